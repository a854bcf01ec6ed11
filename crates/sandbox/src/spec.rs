//! What was asked for. A `Spec` exists only after the API edge has parsed and checked every value in it.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// What the box runs beside the agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind", content = "argv")]
pub enum Entrypoint {
    /// The given argument vector, never empty.
    Command(Vec<String>),
    /// The image's own entrypoint and command.
    Image,
    /// Nothing: the agent alone holds the box open.
    AgentOnly,
}

/// Registry credentials of one request. Never persisted, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Credentials(***)")
    }
}

/// Operating system and architecture, in the wire's closed vocabulary (`linux|windows`, `amd64|arm64`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Platform {
    pub os: String,
    pub arch: String,
}

/// Resource ceilings; `None` means the runtime's default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    /// Thousandths of a processor, at least 1.
    pub cpu_millis: Option<u64>,
    /// Bytes, at least 1.
    pub memory_bytes: Option<u64>,
    /// Processes and threads, at least 1.
    pub pids: Option<u64>,
}

/// A host directory made visible inside, already checked against the allowed prefixes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostVolume {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// Everything a runtime needs to know to make the box, apart from credentials.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The image reference exactly as asked for.
    pub image: String,
    pub entrypoint: Entrypoint,
    /// Environment of every process inside; later entries win.
    pub env: Vec<(String, String)>,
    pub limits: Limits,
    /// Only when the request carried one: it is echoed exactly then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub platform: Option<Platform>,
    pub volumes: Vec<HostVolume>,
    /// The extensions as asked for; which of them are echoed is the API's business.
    pub extensions: BTreeMap<String, String>,
    pub secure_access: bool,
}

/// The two facts about a sandbox that may change while it lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableFacts {
    /// `None`: manual cleanup, the sandbox never expires.
    pub expires_at: Option<Timestamp>,
    pub metadata: BTreeMap<String, String>,
}
