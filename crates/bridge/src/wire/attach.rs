//! `POST /internal/agent/v1/attach`

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{BootId, LeaseId, SandboxId, Secret};

/// The agent presents itself. Needs the token, no lease.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachRequest {
    pub sandbox_id: SandboxId,
    /// The sandbox's generation that the agent was started for, from 1.
    pub generation: u64,
    pub boot_id: BootId,
    pub agent_version: String,
    pub protocol_version: u32,
    #[serde(default)]
    pub capabilities: Vec<String>,
    /// The newest event of this boot; 0 before the first.
    #[serde(default)]
    pub last_seq: u64,
}

/// The server's answer: a lease and where to go on.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AttachReply {
    pub lease_id: LeaseId,
    /// How often to beat; the first beat is due at once.
    pub heartbeat_interval_seconds: u64,
    /// Silence after which the lease ends.
    pub lease_timeout_seconds: u64,
    /// The newest event of this boot that the server has; 0 for none.
    #[serde(default)]
    pub acked_seq: u64,
    /// For people who read logs of both sides. No decision rests on it.
    pub server_time: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// The sandbox is stopping: the lease takes events, logs and results, and hands out nothing new but the end.
    #[serde(default)]
    pub draining: bool,
    /// What the server wants to tell at this point; may hold secrets.
    #[serde(default)]
    pub config: Secret<Value>,
}
