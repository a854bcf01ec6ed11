//! Addresses and headers of the channel.

pub const ATTACH: &str = "/internal/agent/v1/attach";
pub const STREAM: &str = "/internal/agent/v1/stream";
pub const EVENTS: &str = "/internal/agent/v1/events";
pub const HEARTBEAT: &str = "/internal/agent/v1/heartbeat";
pub const LOGS: &str = "/internal/agent/v1/logs";
pub const COMMANDS: &str = "/internal/agent/v1/commands";
pub const FATAL: &str = "/internal/agent/v1/fatal";
pub const GIT_CREDENTIAL: &str = "/internal/agent/v1/credentials/git";

/// Who speaks. Sent with every call, next to `Authorization: Bearer <token>`.
pub const SANDBOX_HEADER: &str = "x-sandbox-id";
pub const GENERATION_HEADER: &str = "x-sandbox-generation";
/// The lease that the attachment gave; absent on `attach` and `fatal`.
pub const LEASE_HEADER: &str = "x-agent-lease";
/// Position to resume the stream from: the identifier of the last command that arrived.
pub const LAST_EVENT_ID: &str = "last-event-id";

/// `/internal/agent/v1/commands/{commandId}/result`
pub fn command_result(command: &super::CommandId) -> String {
    format!("{COMMANDS}/{command}/result")
}

/// The command that a result's path names.
pub fn command_of_result(path: &str) -> Option<&str> {
    path.strip_prefix(COMMANDS)?.strip_prefix('/')?.strip_suffix("/result")
}
