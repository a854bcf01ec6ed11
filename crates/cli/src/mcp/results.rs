//! What the tools answer, read from what the server and the agent say.
//!
//! Only named parts are taken over, so nothing that a server adds, a credential for instance, reaches a model by accident.

use std::collections::BTreeMap;

use rmcp::schemars::{self, JsonSchema};
use serde::Serialize;
use serde_json::Value;

use super::{arguments::Encoding, excerpt::Shown};
use crate::client::Sandbox;

/// A sandbox
#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxInfo {
    pub id: String,
    pub status: Status,
    /// What the sandbox lives for
    pub entrypoint: Vec<String>,
    pub created_at: String,
    /// When the sandbox is removed; absent: when it is killed
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub extensions: BTreeMap<String, String>,
}

/// What state something is in, and why
#[derive(Debug, Serialize, JsonSchema)]
pub struct Status {
    pub state: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_transition_at: Option<String>,
}

fn text(value: &Value, pointer: &str) -> Option<String> {
    value.pointer(pointer)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
}

fn texts(value: &Value, key: &str) -> BTreeMap<String, String> {
    let map = value.get(key).and_then(Value::as_object);
    let pairs = map.into_iter().flatten();
    pairs.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_owned()))).collect()
}

impl Status {
    fn of(value: &Value) -> Self {
        Self {
            state: text(value, "/status/state").unwrap_or_else(|| "Unknown".to_owned()),
            reason: text(value, "/status/reason"),
            message: text(value, "/status/message"),
            last_transition_at: text(value, "/status/lastTransitionAt"),
        }
    }
}

impl SandboxInfo {
    /// Of the API's description.
    pub fn of(sandbox: &Sandbox) -> Self {
        let value = &sandbox.0;
        let entrypoint = value.get("entrypoint").and_then(Value::as_array);
        Self {
            id: sandbox.id().to_owned(),
            status: Status::of(value),
            entrypoint: entrypoint
                .into_iter()
                .flatten()
                .filter_map(|word| Some(word.as_str()?.to_owned()))
                .collect(),
            created_at: sandbox.created_at().to_owned(),
            expires_at: text(value, "/expiresAt"),
            image: text(value, "/image/uri"),
            snapshot_id: text(value, "/snapshotId"),
            metadata: texts(value, "metadata"),
            extensions: texts(value, "extensions"),
        }
    }
}

/// A sandbox and whether it can be used
#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxReady {
    pub sandbox_id: String,
    /// Whether its agent answered; when false, sandbox_connect waits for it
    pub ready: bool,
    pub info: SandboxInfo,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct SandboxPage {
    pub sandbox_infos: Vec<SandboxInfo>,
    pub pagination: Pagination,
    /// Ids of what this MCP server has created since it started and not killed, on any page
    pub created_here: Vec<String>,
}

/// Where in a list a page stands
#[derive(Debug, Serialize, JsonSchema)]
pub struct Pagination {
    pub page: u64,
    pub page_size: u64,
    pub total_items: u64,
    pub total_pages: u64,
    pub has_next_page: bool,
}

impl Pagination {
    /// Of the API's answer.
    pub fn of(answer: &Value) -> Self {
        let number = |key: &str| answer.pointer(key).and_then(Value::as_u64).unwrap_or(0);
        Self {
            page: number("/pagination/page"),
            page_size: number("/pagination/pageSize"),
            total_items: number("/pagination/totalItems"),
            total_pages: number("/pagination/totalPages"),
            has_next_page: answer
                .pointer("/pagination/hasNextPage")
                .and_then(Value::as_bool)
                .unwrap_or(false),
        }
    }
}

/// What was done
#[derive(Debug, Serialize, JsonSchema)]
pub struct Done {
    /// One word for it
    pub status: &'static str,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Expiry {
    pub expires_at: String,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct State {
    pub sandbox_id: String,
    pub status: Status,
}

impl State {
    /// Of the API's description.
    pub fn of(sandbox: &Sandbox) -> Self {
        Self { sandbox_id: sandbox.id().to_owned(), status: Status::of(&sandbox.0) }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Metrics {
    pub cpu_count: f64,
    pub cpu_used_percentage: f64,
    pub memory_total_in_mib: f64,
    pub memory_used_in_mib: f64,
    /// When, in milliseconds since 1970
    pub timestamp: i64,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Health {
    pub sandbox_id: String,
    pub healthy: bool,
    /// Why not
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct EndpointInfo {
    /// Host, port and path
    pub endpoint: String,
    /// The same with the scheme in front
    pub url: String,
    /// To be sent with every request there
    pub headers: BTreeMap<String, String>,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Diagnostics {
    pub sandbox_id: String,
    pub content: Shown,
}

/// How a command went
#[derive(Debug, Serialize, JsonSchema)]
pub struct Execution {
    /// Id for command_status, command_logs and command_interrupt
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Exit code; -1 when a signal ended the command; absent while it runs or when it could not be started
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    /// Why there is no exit code, or which signal it was
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the command was started in the background and may still be running
    pub background: bool,
    pub stdout: Shown,
    pub stderr: Shown,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct ExecutionStatus {
    pub id: String,
    pub running: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<String>,
}

impl ExecutionStatus {
    /// Of the agent's answer.
    pub fn of(id: &str, answer: &Value) -> Self {
        Self {
            id: id.to_owned(),
            running: answer.get("running").and_then(Value::as_bool).unwrap_or(false),
            exit_code: answer.get("exit_code").and_then(Value::as_i64),
            error: text(answer, "/error"),
            command: text(answer, "/content"),
            started_at: text(answer, "/started_at"),
            finished_at: text(answer, "/finished_at"),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct LogPiece {
    /// Output since the cursor, stdout and stderr as they were written
    pub output: String,
    /// To be given to the next call
    pub cursor: u64,
    /// Whether there was more; ask again with the cursor
    pub truncated: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct FileContent {
    pub path: String,
    pub content: String,
    pub encoding: Encoding,
    /// Bytes in `content`
    pub bytes: u64,
    /// Bytes in the file, where known
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Whether there was more than `max_bytes`
    pub truncated: bool,
    /// The range_header to go on with
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_range_header: Option<String>,
}

/// A file or directory
#[derive(Debug, Serialize, JsonSchema)]
pub struct EntryInfo {
    pub path: String,
    /// file, directory, symlink or other
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Permissions spelled in octal digits
    pub mode: u64,
    pub owner: String,
    pub group: String,
    pub size: u64,
    pub modified_at: String,
    pub created_at: String,
}

impl EntryInfo {
    /// Of the agent's description.
    pub fn of(value: &Value) -> Self {
        let number = |key: &str| value.get(key).and_then(Value::as_u64).unwrap_or(0);
        let word = |pointer: &str| text(value, pointer).unwrap_or_default();
        Self {
            path: word("/path"),
            kind: text(value, "/type"),
            mode: number("mode"),
            owner: word("/owner"),
            group: word("/group"),
            size: number("size"),
            modified_at: word("/modified_at"),
            created_at: word("/created_at"),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Entries {
    pub result: Vec<EntryInfo>,
    /// How many there are
    pub total: u64,
    /// Whether `result` holds only the first of them
    pub truncated: bool,
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct Replacements {
    pub result: Vec<Replacement>,
}

/// What was replaced in one file
#[derive(Debug, Serialize, JsonSchema)]
pub struct Replacement {
    pub path: String,
    /// Occurrences; 0 means that the text was not found and the file is as it was
    pub replaced_count: u64,
}

/// A copy of a sandbox's files
#[derive(Debug, Serialize, JsonSchema)]
pub struct SnapshotInfo {
    pub id: String,
    pub sandbox_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Creating, Ready, Failed or Deleting
    pub status: Status,
    pub created_at: String,
}

impl SnapshotInfo {
    /// Of the API's description.
    pub fn of(value: &Value) -> Self {
        Self {
            id: text(value, "/id").unwrap_or_default(),
            sandbox_id: text(value, "/sandboxId").unwrap_or_default(),
            name: text(value, "/name"),
            status: Status::of(value),
            created_at: text(value, "/createdAt").unwrap_or_default(),
        }
    }
}

#[derive(Debug, Serialize, JsonSchema)]
pub struct SnapshotPage {
    pub snapshots: Vec<SnapshotInfo>,
    pub pagination: Pagination,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_sandbox_is_told_without_what_was_not_asked_for() {
        let sandbox = Sandbox(json!({
            "id": "a", "createdAt": "2030-01-01T00:00:00Z", "entrypoint": ["tail", "-f"],
            "image": { "uri": "tools:1", "auth": { "password": "hunter2" } },
            "status": { "state": "Running", "reason": "", "lastTransitionAt": null },
            "metadata": { "k": "v", "odd": 3 }, "token": "t-1",
        }));
        let told = serde_json::to_value(SandboxInfo::of(&sandbox)).unwrap();
        let expected = json!({
            "id": "a", "created_at": "2030-01-01T00:00:00Z", "entrypoint": ["tail", "-f"], "image": "tools:1",
            "status": { "state": "Running" }, "metadata": { "k": "v" },
        });
        assert_eq!(told, expected);
    }

    #[test]
    fn a_status_of_a_command_that_runs_has_no_exit_code() {
        let told = ExecutionStatus::of("c", &json!({ "running": true, "content": "sleep 9" }));
        assert_eq!((told.running, told.exit_code, told.command.as_deref()), (true, None, Some("sleep 9")));
    }
}
