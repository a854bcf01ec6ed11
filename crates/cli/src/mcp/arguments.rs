//! What the tools take.
//!
//! Names follow `opensandbox-mcp`, so that a model's habits and people's prompts carry over. Unknown names are refused: a
//! misspelt argument that is silently ignored costs a model more than an error.

use std::collections::BTreeMap;

use rmcp::schemars::{self, JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

/// The id of a sandbox, snapshot or command: one harmless path segment.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Id(String);

impl Id {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl TryFrom<String> for Id {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        if (1..=128).contains(&text.len()) && text.chars().all(plain) && !text.starts_with('.') {
            Ok(Self(text))
        } else {
            Err("an id has 1 to 128 letters, digits, `-`, `_` or `.`".to_owned())
        }
    }
}

impl JsonSchema for Id {
    fn inline_schema() -> bool {
        true
    }

    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Id".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        schemars::json_schema!({
            "type": "string", "pattern": "^[A-Za-z0-9_-][A-Za-z0-9_.-]*$", "maxLength": 128
        })
    }
}

fn ten_minutes() -> Option<f64> {
    Some(600.0)
}

fn one_minute() -> f64 {
    60.0
}

fn half_a_minute() -> f64 {
    30.0
}

fn shown_output() -> u32 {
    64 << 10
}

fn shown_file() -> u32 {
    256 << 10
}

fn first() -> u32 {
    1
}

fn page_of_twenty() -> u32 {
    20
}

fn hundred_lines() -> u32 {
    100
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxCreate {
    /// Container image, e.g. `python:3.12`; exactly one of `image` and `snapshot_id` is needed
    pub image: Option<String>,
    /// Snapshot to restore instead of starting from an image
    pub snapshot_id: Option<Id>,
    /// User name at the image's registry
    pub auth_username: Option<String>,
    /// Password or token for it
    pub auth_password: Option<String>,
    /// Seconds after which the sandbox is removed, at least 60; null: it stays until it is killed
    #[serde(default = "ten_minutes")]
    #[schemars(range(min = 60.0))]
    pub timeout_seconds: Option<f64>,
    /// Seconds to wait until the sandbox can be used; a slow image pull goes on after that
    #[serde(default = "one_minute")]
    #[schemars(range(min = 0.0, max = 3600.0))]
    pub ready_timeout_seconds: f64,
    /// Return at once, before the sandbox can be used
    #[serde(default)]
    pub skip_health_check: bool,
    /// Environment variables of everything that runs in the sandbox
    pub env: Option<BTreeMap<String, String>>,
    /// Labels to find the sandbox by
    pub metadata: Option<BTreeMap<String, String>>,
    /// Limits such as `{"cpu": "500m", "memory": "512Mi"}`; default: one processor and 2Gi
    pub resource: Option<BTreeMap<String, String>>,
    /// What the sandbox may reach; without it, whatever the server allows
    pub network_policy: Option<NetworkPolicy>,
    /// Settings that the server passes to its runtime
    pub extensions: Option<BTreeMap<String, String>>,
    /// What the sandbox lives for; default: a program that waits
    #[schemars(length(min = 1))]
    pub entrypoint: Option<Vec<String>>,
}

/// Outgoing connections
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "camelCase")]
pub struct NetworkPolicy {
    /// What happens to a destination that no rule names; default: deny
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_action: Option<Action>,
    /// Rules; the first that matches counts
    #[serde(skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<NetworkRule>>,
}

/// One destination
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct NetworkRule {
    pub action: Action,
    /// Domain name, also with a wildcard as in `*.example.com`
    pub target: String,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Action {
    Allow,
    Deny,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxConnect {
    /// Id of a sandbox that exists
    pub sandbox_id: Id,
    /// Seconds to wait until it can be used
    #[serde(default = "half_a_minute")]
    #[schemars(range(min = 0.0, max = 3600.0))]
    pub connect_timeout_seconds: f64,
    /// Return at once, without asking whether it can be used
    #[serde(default)]
    pub skip_health_check: bool,
}

/// A tool that needs to know which sandbox and nothing else
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxOnly {
    /// Id of the sandbox
    pub sandbox_id: Id,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxList {
    /// Which sandboxes, and which page of them
    pub filter: Option<SandboxFilter>,
}

/// Conditions that all have to hold
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxFilter {
    /// Any of these states: Pending, Running, Pausing, Paused, Resuming, Stopping, Terminated, Failed
    pub states: Option<Vec<String>>,
    /// All of these labels
    pub metadata: Option<BTreeMap<String, String>>,
    /// Page, from 1
    #[schemars(range(min = 1))]
    pub page: Option<u32>,
    /// Sandboxes on a page; default 20
    #[schemars(range(min = 1, max = 200))]
    pub page_size: Option<u32>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxRenew {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Seconds from now after which the sandbox is removed
    #[schemars(range(min = 1.0))]
    pub timeout_seconds: f64,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxEndpoint {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Port that something in the sandbox listens on
    #[schemars(range(min = 1))]
    pub port: u16,
    /// An address that leads through the sandbox server and works wherever the server can be reached
    #[serde(default)]
    pub use_server_proxy: bool,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SandboxDiagnostics {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// `logs`: what the entrypoint printed; `events`: what happened to the sandbox; `summary`: both, and its state
    pub kind: Diagnosis,
    /// Lines, the last ones
    #[serde(default = "hundred_lines")]
    #[schemars(range(min = 1, max = 500))]
    pub lines: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Diagnosis {
    Logs,
    Events,
    Summary,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandRun {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Shell command line; pipes, redirections and several lines are fine
    #[schemars(length(min = 1))]
    pub command: String,
    /// Start the command and return its id at once, for servers and long work; see command_status and command_logs
    #[serde(default)]
    pub background: bool,
    /// Directory to run in
    pub working_directory: Option<String>,
    /// Environment variables of this command, in addition to the sandbox's
    pub env: Option<BTreeMap<String, String>>,
    /// Seconds after which the command is killed
    #[schemars(range(min = 0.001))]
    pub timeout_seconds: Option<f64>,
    /// Bytes to return of each of stdout and stderr; of longer output the beginning and the end are returned
    #[serde(default = "shown_output")]
    #[schemars(range(min = 1024, max = 1_048_576))]
    pub max_output_bytes: u32,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandOnly {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// The `id` that command_run returned
    pub execution_id: Id,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CommandLogs {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// The `id` that command_run returned
    pub execution_id: Id,
    /// Where to go on: the `cursor` of the call before
    #[serde(default)]
    pub cursor: u64,
    /// Bytes to return
    #[serde(default = "shown_output")]
    #[schemars(range(min = 1024, max = 1_048_576))]
    pub max_bytes: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[schemars(inline)]
pub enum Encoding {
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    #[serde(rename = "base64")]
    Base64,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileRead {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// File in the sandbox
    #[schemars(length(min = 1))]
    pub path: String,
    /// `utf-8` for text, `base64` for anything else
    #[serde(default)]
    pub encoding: Encoding,
    /// Bytes to read, as in HTTP: `bytes=0-999`, `bytes=1000-`, `bytes=-500`
    #[schemars(regex(pattern = r"^bytes=(\d+-\d*|-\d+)$"))]
    pub range_header: Option<String>,
    /// First line to read, from 1; not together with range_header
    #[schemars(range(min = 1))]
    pub offset: Option<u64>,
    /// Lines to read; not together with range_header
    #[schemars(range(min = 1))]
    pub limit: Option<u64>,
    /// Bytes to return; a longer file is cut and the answer says where to go on
    #[serde(default = "shown_file")]
    #[schemars(range(min = 1, max = 1_048_576))]
    pub max_bytes: u32,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileWrite {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// File in the sandbox; missing directories are made, an existing file is replaced
    #[schemars(length(min = 1))]
    pub path: String,
    /// All of the file's content
    pub content: String,
    /// How `content` is written: as text or as base64
    #[serde(default)]
    pub encoding: Encoding,
    /// Permissions spelled in octal digits, e.g. 644 or 755
    #[schemars(range(min = 0, max = 777))]
    pub mode: Option<u32>,
    /// Owner's name
    pub owner: Option<String>,
    /// Group's name
    pub group: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Paths {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Paths in the sandbox
    #[schemars(length(min = 1))]
    pub paths: Vec<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileList {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Directory in the sandbox
    #[schemars(length(min = 1))]
    pub path: String,
    /// How deep to go; 1 is the directory's own entries
    #[serde(default = "first")]
    #[schemars(range(min = 1, max = 64))]
    pub depth: u32,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileSearch {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Directory to search, with everything below it
    #[schemars(length(min = 1))]
    pub path: String,
    /// Pattern for file names, e.g. `*.py` or `test_?.{c,h}`
    #[schemars(length(min = 1))]
    pub pattern: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileCreateDirectories {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Directories to make
    #[schemars(length(min = 1))]
    pub entries: Vec<DirectoryEntry>,
}

/// A directory to make, with its parents
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DirectoryEntry {
    #[schemars(length(min = 1))]
    pub path: String,
    /// Permissions spelled in octal digits; default 755
    #[schemars(range(min = 0, max = 777))]
    pub mode: Option<u32>,
    /// Owner's name
    pub owner: Option<String>,
    /// Group's name
    pub group: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileMove {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// What to move, in this order
    #[schemars(length(min = 1))]
    pub entries: Vec<MoveEntry>,
}

/// A file or directory to move or rename
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MoveEntry {
    pub source: String,
    /// Must not exist
    pub destination: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct FileReplaceContents {
    /// Id of the sandbox
    pub sandbox_id: Id,
    /// Replacements, made in this order
    #[schemars(length(min = 1))]
    pub entries: Vec<ReplaceEntry>,
}

/// All occurrences of a text in one file
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ReplaceEntry {
    pub path: String,
    /// Text to look for, byte for byte
    #[schemars(length(min = 1))]
    pub old_content: String,
    /// Text to put there
    pub new_content: String,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotCreate {
    /// Id of a running sandbox
    pub sandbox_id: Id,
    /// Name to find the snapshot by
    #[schemars(length(min = 1))]
    pub name: Option<String>,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotList {
    /// Only snapshots of this sandbox
    pub sandbox_id: Option<Id>,
    /// Only snapshots of this name
    pub name: Option<String>,
    /// Page
    #[serde(default = "first")]
    #[schemars(range(min = 1))]
    pub page: u32,
    /// Snapshots on a page
    #[serde(default = "page_of_twenty")]
    #[schemars(range(min = 1, max = 200))]
    pub page_size: u32,
}

#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotOnly {
    /// Id of the snapshot
    pub snapshot_id: Id,
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_id_is_one_path_segment() {
        for good in ["550e8400-e29b-41d4-a716-446655440000", "fsb-1", "c0ffee"] {
            assert!(Id::try_from(good.to_owned()).is_ok(), "{good}");
        }
        for bad in ["", ".", "..", "a/b", "a?b", "a b", "\u{e4}", &"x".repeat(129)] {
            assert!(Id::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn unknown_and_missing_arguments_are_named() {
        let misspelt = json!({ "sandbox_id": "a", "command": "ls", "timeout": 3 });
        let error = serde_json::from_value::<CommandRun>(misspelt).unwrap_err().to_string();
        assert!(error.contains("`timeout`") && error.contains("`timeout_seconds`"), "{error}");
        let error = serde_json::from_value::<CommandRun>(json!({ "command": "ls" })).unwrap_err().to_string();
        assert!(error.contains("sandbox_id"), "{error}");
    }

    #[test]
    fn an_absent_lifetime_is_ten_minutes_and_null_is_none() {
        let of = |value| serde_json::from_value::<SandboxCreate>(value).unwrap().timeout_seconds;
        assert_eq!(of(json!({ "image": "a" })), Some(600.0));
        assert_eq!(of(json!({ "image": "a", "timeout_seconds": null })), None);
        assert_eq!(of(json!({ "image": "a", "timeout_seconds": 90 })), Some(90.0));
    }
}
