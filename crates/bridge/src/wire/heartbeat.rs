//! `POST /internal/agent/v1/heartbeat`

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::LeaseId;

/// A sign of life with what counts as being in use. The heartbeat itself never counts as use.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Heartbeat {
    pub lease_id: LeaseId,
    #[serde(default)]
    pub activity: Activity,
    #[serde(default)]
    pub services: Vec<ServiceHealth>,
    #[serde(default)]
    pub load: Load,
}

/// What is open in the box right now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Activity {
    /// Commands that run by request.
    pub commands: u32,
    /// Open terminals.
    pub ptys: u32,
    pub ssh_sessions: u32,
    /// Explicit activity leases.
    pub leases: u32,
    /// Connections through the agent to ports of the box.
    pub proxy_connections: u32,
}

impl Activity {
    /// Whether anything is open.
    pub fn is_active(&self) -> bool {
        *self != Self::default()
    }
}

/// One managed service, as far as health is concerned.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceHealth {
    pub name: String,
    /// `Disabled`, `Starting`, `Ready`, `Restarting`, `Failed`, `Stopped`; others are tolerated.
    pub state: String,
    #[serde(default)]
    pub restart_count: u32,
}

/// How loaded the box is, where it can be told.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Load {
    /// Runnable tasks, averaged over a minute.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub average: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeartbeatReply {
    pub lease_timeout_seconds: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
    /// Commands without a result.
    #[serde(default)]
    pub commands_pending: u32,
    /// See [`AttachReply::draining`](super::AttachReply::draining).
    #[serde(default)]
    pub draining: bool,
}
