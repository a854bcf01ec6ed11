//! The runtime port: what a backend must be able to do, and the facts it reports.
//!
//! Backends report facts ([`Observation`]), never lifecycle states; the control plane composes states from intents and
//! observations. Every method is keyed by our id and idempotent.

use std::{collections::BTreeMap, net::Ipv4Addr, time::Duration};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use serde::{Deserialize, Serialize};

use crate::{
    ids::SandboxId,
    spec::{Credentials, MutableFacts, Platform, Spec},
    time::Timestamp,
};

/// Why a backend could not do something.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuntimeErrorKind {
    /// The box, image or object does not exist.
    NotFound,
    /// Another object is in the way.
    Exists,
    /// The request can never succeed as asked.
    Invalid,
    /// The image could not be fetched or read.
    ImagePull,
    /// The backend cannot be reached or is not ready; trying later may help.
    Unavailable,
    /// A finite resource (addresses, disk, memory) is used up.
    Exhausted,
    /// The backend tried and failed.
    Failed,
}

/// A backend's failure: what kind, in which phase of which operation, and a message fit for the user.
#[derive(Debug, Clone, thiserror::Error, Serialize, Deserialize)]
#[error("{phase}: {message}")]
#[serde(rename_all = "camelCase")]
pub struct RuntimeError {
    pub kind: RuntimeErrorKind,
    /// The step that failed, in the backend's words: `image`, `rootfs`, `network`, `cgroup`, `entrypoint`, …
    pub phase: String,
    /// Actionable text without secrets.
    pub message: String,
}

impl RuntimeError {
    pub fn new(kind: RuntimeErrorKind, phase: &str, message: impl Into<String>) -> Self {
        Self { kind, phase: phase.into(), message: message.into() }
    }

    /// Whether the same call may succeed later without anybody changing anything.
    pub fn retryable(&self) -> bool {
        match self.kind {
            RuntimeErrorKind::Unavailable => true,
            RuntimeErrorKind::NotFound
            | RuntimeErrorKind::Exists
            | RuntimeErrorKind::Invalid
            | RuntimeErrorKind::ImagePull
            | RuntimeErrorKind::Exhausted
            | RuntimeErrorKind::Failed => false,
        }
    }
}

/// What a backend can do; consulted before a request is accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities {
    pub pause: bool,
    pub snapshot: bool,
    pub gpu: bool,
    pub network_policy: bool,
    pub host_volumes: bool,
}

/// How a box ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Exit {
    /// Exit code, absent when it was killed by a signal or never started.
    pub code: Option<i32>,
    pub signal: Option<i32>,
    pub cause: ExitCause,
    pub message: String,
    pub at: Timestamp,
}

/// Who or what ended a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExitCause {
    Exited,
    Signalled,
    OutOfMemory,
    EntrypointFailed,
    /// The process that supervised the box died, and the box with it.
    SupervisorLost,
    CreateFailed,
}

/// The condition of a box as its backend sees it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Condition {
    /// Being made; not usable yet.
    Starting,
    Running,
    Paused,
    Exited(Exit),
}

/// The facts about one existing box.
#[derive(Debug, Clone)]
pub struct Observation {
    pub id: SandboxId,
    /// Grows with every observation a runtime process makes, so that a late delivery never overwrites a newer one.
    pub revision: u64,
    pub spec: Spec,
    /// The argument vector that runs, after `Entrypoint::Image` was resolved; may be empty.
    pub entrypoint: Vec<String>,
    pub facts: MutableFacts,
    pub condition: Condition,
    pub created_at: Timestamp,
    pub started_at: Option<Timestamp>,
    /// When the condition last changed.
    pub since: Timestamp,
    /// Where the box's ports are reachable from this host.
    pub address: Option<Ipv4Addr>,
    pub agent_port: u16,
    pub agent_token: String,
    pub route_token: String,
}

/// What `start` needs beside the spec.
#[derive(Debug, Clone)]
pub struct StartPlan {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub created_at: Timestamp,
    pub agent_token: String,
    pub route_token: String,
}

/// One event in a box's own history, recorded by whoever supervises it.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BoxEvent {
    pub at: Timestamp,
    pub kind: String,
    pub message: String,
}

/// What `watch` delivers. Consumers treat it as "look again", so a duplicate does no harm.
#[derive(Debug, Clone)]
pub enum RuntimeEvent {
    /// The box's facts changed; the new ones.
    Observed(Box<Observation>),
    /// The box is gone and nothing of it is left.
    Removed(SandboxId),
    /// Something happened inside; it is in the box's own history already.
    Happened(SandboxId, BoxEvent),
    /// Something outside concerns the box; nobody has recorded it.
    Noticed(SandboxId, BoxEvent),
}

/// Progress of `prepare`, for logs and events.
#[derive(Debug, Clone)]
pub struct PrepareProgress {
    pub phase: &'static str,
    pub message: String,
}

/// Resource use of one box right now.
#[derive(Debug, Clone, Copy, Default)]
pub struct Usage {
    pub memory_bytes: Option<u64>,
    pub cpu_usec: Option<u64>,
    pub pids: Option<u64>,
}

/// A backend that can hold boxes.
#[async_trait]
pub trait Runtime: Send + Sync + 'static {
    /// Short stable name, e.g. `embedded`.
    fn name(&self) -> &'static str;

    fn capabilities(&self) -> Capabilities;

    /// Makes the image present. Already present is success and cheap.
    async fn prepare(
        &self,
        image: &str,
        auth: Option<&Credentials>,
        platform: Option<&Platform>,
    ) -> Result<(), RuntimeError>;

    /// Makes and starts the box and returns once its agent answers. An existing box of that id is success;
    /// leftovers of an interrupted attempt are removed first. On failure nothing is left.
    async fn start(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError>;

    /// Freezes every process of the box. Already paused is success; an absent box is `NotFound`.
    async fn pause(&self, id: SandboxId) -> Result<Observation, RuntimeError>;

    /// Thaws the box. Already running is success; an absent box is `NotFound`.
    async fn resume(&self, id: SandboxId) -> Result<Observation, RuntimeError>;

    /// Stops and removes the box, giving it `grace` to end by itself. Absent is success.
    async fn remove(&self, id: SandboxId, grace: Duration) -> Result<(), RuntimeError>;

    /// Replaces the mutable facts. An absent box is `NotFound`.
    async fn update_facts(&self, id: SandboxId, facts: &MutableFacts) -> Result<Observation, RuntimeError>;

    /// The facts about one box, read afresh; `None` when there is no such box.
    async fn inspect(&self, id: SandboxId) -> Result<Option<Observation>, RuntimeError>;

    /// Every box there is, read afresh. Half-made leftovers without a readable specification are removed, not listed.
    async fn list(&self) -> Result<Vec<Observation>, RuntimeError>;

    /// Changes from now on. Call once; a second call supersedes the first.
    fn watch(&self) -> BoxStream<'static, RuntimeEvent>;

    /// The last `lines` lines of the entrypoint's output, oldest first, each `<RFC 3339> <stdout|stderr> <text>`.
    async fn logs(&self, id: SandboxId, lines: usize) -> Result<Vec<String>, RuntimeError>;

    /// The box's own history, oldest first.
    async fn events(&self, id: SandboxId) -> Result<Vec<BoxEvent>, RuntimeError>;

    /// Resource use, best effort.
    async fn usage(&self, id: SandboxId) -> Result<Usage, RuntimeError>;

    /// Free-form facts for the inspect text: label, value.
    async fn describe(&self, id: SandboxId) -> Result<BTreeMap<String, String>, RuntimeError>;
}
