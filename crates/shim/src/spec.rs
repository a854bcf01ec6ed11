//! What a box is asked to be, and what has become of it: the types of the files in a sandbox directory.
//!
//! Owned here: the shape of `spec.json`, `facts.json`, `state.json` and one line of `events.jsonl`.
//! Not here: how the files are read and written (`directory.rs`), or what goes over the sockets (`protocol.rs`).
//! Invariant: a newer shim reads files that an older server wrote, so fields are only ever added, with defaults.

use std::collections::BTreeMap;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The only version of [`BoxSpec`] that this shim understands.
pub const SPEC_VERSION: u32 = 1;

/// Everything a shim needs to start one box. A shim reads it once; it is replaced once at most, when a box that waited is assigned.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoxSpec {
    pub version: u32,
    pub id: String,
    pub generation: u64,
    pub created_at_ms: i64,
    pub hostname: String,
    pub root: RootSpec,
    pub network: Option<NetworkSpec>,
    /// Stands between the box and the host's network when there is one; needs a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<EgressSpec>,
    pub ids: IdRange,
    pub limits: Limits,
    pub process: ProcessSpec,
    /// The agent's token. It is the reason why the file is readable by root only.
    pub access_token: String,
    pub route_token: String,
    /// How long after `expires_at_ms` the shim removes the box by itself when no server does it.
    pub expiry_grace_ms: u64,
    /// Whatever the server wants to find again after a restart; opaque to the shim.
    #[serde(default)]
    pub about: Value,
}

/// The root file system of a box.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RootSpec {
    /// Read-only layers as host paths, top layer first.
    pub lowers: Vec<PathBuf>,
    #[serde(default)]
    pub grafts: Vec<Graft>,
    #[serde(default)]
    pub read_only: bool,
    #[serde(default)]
    pub volumes: Vec<Bind>,
}

/// A host directory shown at `target` through an overlay of its own, so that writes never reach it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Graft {
    pub lower: PathBuf,
    pub target: PathBuf,
}

/// A host file or directory shown at `target` directly: writes reach the host.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bind {
    pub source: PathBuf,
    pub target: PathBuf,
    pub read_only: bool,
}

/// The box's one interface. `None` in [`BoxSpec`] means loopback only.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkSpec {
    pub address: Ipv4Addr,
    /// Link-local and the same in every box; no interface of the host carries it.
    pub gateway: Ipv4Addr,
    /// At most 15 characters and never used twice: a deleted veth keeps its name until the kernel has cleaned up.
    pub host_interface: String,
    pub mtu: u32,
    #[serde(default)]
    pub dns: Vec<IpAddr>,
    #[serde(default)]
    pub search: Vec<String>,
}

/// The program that decides what leaves the box, and what it is given. It runs outside of the box.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressSpec {
    /// Host path of the static program.
    pub program: PathBuf,
    /// Its settings, besides those that say where it is placed. Some are secret.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    /// Host user and group that it runs as; nobody else's.
    pub user: u32,
    /// How long it may take to enforce before the create fails.
    pub ready_within_ms: u64,
    #[serde(default)]
    pub limits: EgressLimits,
    /// Files and directories of the host that it can read, each at `target`.
    #[serde(default)]
    pub views: Vec<Bind>,
    /// The box sees the certificate of the authority with which connections are intercepted.
    #[serde(default)]
    pub authority: bool,
}

/// Settings are told by name only.
impl std::fmt::Debug for EgressSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<&str> = self.env.iter().map(|(name, _)| name.as_str()).collect();
        f.debug_struct("EgressSpec")
            .field("program", &self.program)
            .field("env", &names)
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// What the program may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressLimits {
    /// `None`: unlimited.
    pub cpu_millis: Option<u64>,
    /// `None`: 256 MiB, where the host can limit memory.
    pub memory_bytes: Option<u64>,
}

/// Host ids of the box: id 0 inside is `base` outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IdRange {
    pub base: u32,
    pub count: u32,
}

/// Resource limits. `None` means unlimited; a limit that the host cannot enforce fails the create.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Limits {
    pub cpu_millis: Option<u64>,
    pub memory_bytes: Option<u64>,
    /// Swap on top of the memory; none by default.
    pub swap_bytes: Option<u64>,
    pub pids: u64,
    pub nofile: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cpu_millis: None, memory_bytes: None, swap_bytes: None, pids: 4096, nofile: 65_536 }
    }
}

/// What runs in the box.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessSpec {
    /// Host path of the static agent binary.
    pub agent: PathBuf,
    /// Empty means that the agent alone holds the box open.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// The complete environment of user processes.
    #[serde(default)]
    pub env: Vec<(String, String)>,
    #[serde(default)]
    pub cwd: String,
    /// Docker's syntax; empty means root.
    #[serde(default)]
    pub user: String,
    pub agent_port: u16,
    /// The agent may make namespaces inside the box, for isolated sessions.
    #[serde(default)]
    pub isolation: bool,
    /// Hooks for the agent; opaque to the shim, null without any.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub lifecycle: Value,
    /// The agent starts nothing and answers nobody until it is told whose the box is.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub standby: bool,
}

/// What may change during a box's life. Written by the server only; the shim re-reads it before it acts on it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableFacts {
    pub expires_at_ms: Option<i64>,
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    #[serde(default)]
    pub revision: u64,
}

/// How far a box has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    Creating,
    Running,
    Exited,
}

/// What the shim knows about its box; the content of `state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoxState {
    pub phase: Phase,
    pub paused: bool,
    pub init_pid: Option<i32>,
    pub init_start_ticks: Option<u64>,
    pub shim_pid: i32,
    pub shim_start_ticks: u64,
    pub boot_id: String,
    pub started_at_ms: Option<i64>,
    pub exit: Option<ExitRecord>,
    /// The process that enforces the egress policy, while one runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enforcer: Option<ProcessMark>,
}

/// A process that is still the same when both numbers are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ProcessMark {
    pub pid: i32,
    /// Clock ticks after boot.
    pub start_ticks: u64,
}

/// How a box ended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ExitRecord {
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub cause: ExitCause,
    pub message: String,
    pub at_ms: i64,
}

/// Why a box ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitCause {
    Exited,
    Signalled,
    OutOfMemory,
    /// The entrypoint could not be started at all.
    EntrypointFailed,
    /// The shim was killed or the machine restarted; how the box ended is not known.
    ShimLost,
    CreateFailed,
}

/// One line of `events.jsonl`, and what subscribers receive.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoxEvent {
    pub at_ms: i64,
    /// created | started | paused | resumed | oom-kill | pids-limit | exited | expired | removed | warning, and of the
    /// egress policy: egress.denied | egress.injected | egress.noted
    pub kind: String,
    pub message: String,
    #[serde(default)]
    pub data: Value,
}
