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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::wire::{Heartbeat, HeartbeatReply};

    /// The least that a peer of the first version sends is enough, and what a later one adds is no obstacle.
    #[test]
    fn older_and_newer_peers_are_understood() {
        let request: AttachRequest = serde_json::from_value(json!({
            "sandboxId": "s", "generation": 3, "bootId": "b", "agentVersion": "9", "protocolVersion": 2, "mood": "good"
        }))
        .unwrap();
        assert_eq!((request.generation, request.last_seq, request.capabilities.len()), (3, 0, 0));
        let reply: AttachReply = serde_json::from_value(json!({
            "leaseId": "1-1", "heartbeatIntervalSeconds": 15, "leaseTimeoutSeconds": 45, "serverTime": "2026-01-02T03:04:05Z"
        }))
        .unwrap();
        assert_eq!((reply.acked_seq, reply.draining, reply.expires_at), (0, false, None));
        let beat: Heartbeat =
            serde_json::from_value(json!({"leaseId": "1-1", "activity": {"ptys": 1, "dances": 2}})).unwrap();
        assert!(beat.activity.is_active() && beat.services.is_empty());
        let reply: HeartbeatReply = serde_json::from_value(json!({"leaseTimeoutSeconds": 45})).unwrap();
        assert_eq!((reply.commands_pending, reply.draining), (0, false));
    }

    #[test]
    fn messages_have_the_names_that_were_agreed() {
        let request = AttachRequest {
            sandbox_id: "s".parse().unwrap(),
            generation: 1,
            boot_id: "b".parse().unwrap(),
            agent_version: "1".into(),
            protocol_version: 1,
            capabilities: vec!["ssh".into()],
            last_seq: 7,
        };
        let written = serde_json::to_value(&request).unwrap();
        let agreed = json!({
            "sandboxId": "s", "generation": 1, "bootId": "b", "agentVersion": "1", "protocolVersion": 1,
            "capabilities": ["ssh"], "lastSeq": 7
        });
        assert_eq!(written, agreed);
        let beat = Heartbeat {
            lease_id: "1-1".parse().unwrap(),
            activity: Default::default(),
            services: Vec::new(),
            load: Default::default(),
        };
        let agreed = json!({
            "leaseId": "1-1", "services": [], "load": {},
            "activity": {"commands": 0, "ptys": 0, "sshSessions": 0, "leases": 0, "proxyConnections": 0}
        });
        assert_eq!(serde_json::to_value(&beat).unwrap(), agreed);
    }
}
