//! The runtime port: what a backend must be able to do, and the facts it reports.
//!
//! Backends report facts ([`Observation`]), never lifecycle states; the control plane composes states from intents and
//! observations. Every method is keyed by our id and idempotent.

use std::{collections::BTreeMap, net::IpAddr, path::PathBuf, time::Duration};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use serde::{Deserialize, Serialize};

use crate::{
    ids::{SandboxId, SnapshotId},
    spec::{MutableFacts, Secrets, Spec},
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
    /// Others use it, so it cannot be removed.
    InUse,
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
            | RuntimeErrorKind::InUse
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
    pub named_volumes: bool,
    pub object_store_volumes: bool,
    /// Boxes of another architecture or operating system than the server's.
    pub foreign_platforms: bool,
    /// Folders of this machine with sockets in them can be shown in a box, see [`Delivery`].
    pub sockets: bool,
    /// Boxes can be started ahead and be told later whose they are, see [`Runtime::assign`].
    pub standby: bool,
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
    /// What enforced its network policy is gone, and its network with it.
    EgressLost,
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
    pub address: Option<IpAddr>,
    /// How clients reach its ports without going through the server.
    pub exposure: Exposure,
    /// Empty when its agent asks for none.
    pub agent_token: String,
    /// Empty when the sandbox was made by another server, which issued none.
    pub route_token: String,
    /// What its egress enforcer asks for.
    pub egress_token: Option<String>,
}

/// How clients reach a box's ports without going through the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exposure {
    /// At [`Observation::address`], for clients on the same machine.
    Address,
    /// Its ports are ports of the host.
    Host,
    /// Ports of the host lead to the agent, which relays to every port, and to port 8080.
    Published { agent: u16, http: u16, egress: Option<u16> },
    /// Only through the server.
    None,
}

/// What `start` needs beside the spec.
#[derive(Debug, Clone)]
pub struct StartPlan {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub created_at: Timestamp,
    pub agent_token: String,
    pub route_token: String,
    /// What the box finds in its file system beside the image's files.
    pub delivery: Vec<Delivery>,
    /// The agent itself runs as root also where the image names another user: to read what was delivered, or to build. What it runs is the
    /// image's user all the same.
    pub root_agent: bool,
}

/// A file or folder of the server's machine, shown in one box and in no other for as long as the box exists.
///
/// What root owns outside is root's inside, with the same mode. A folder shows what the server makes in it later, sockets included;
/// without [`Capabilities::sockets`] there are only files, as they are when the box is made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery {
    pub source: PathBuf,
    /// Absolute.
    pub target: PathBuf,
    pub read_only: bool,
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
    /// The backend cannot be reached: what was observed may no longer be so.
    Lost(RuntimeError),
    /// It answers again, and the observations before this one were read afresh.
    Back,
}

/// Progress of `prepare`, for logs and events.
#[derive(Debug, Clone)]
pub struct PrepareProgress {
    /// What is done to the image: `pull`.
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

    /// Checks what only the backend can know before a create is accepted: networks, volumes, devices that must exist.
    /// Changes nothing. Bounded in time; `Unavailable` when the backend does not answer.
    async fn admit(&self, spec: &Spec) -> Result<(), RuntimeError>;

    /// Makes the image present. Already present is success and cheap. `progress` is told of what takes long.
    async fn prepare(
        &self,
        spec: &Spec,
        secrets: &Secrets,
        progress: &(dyn Fn(PrepareProgress) + Send + Sync),
    ) -> Result<(), RuntimeError>;

    /// Makes and starts the box and returns once its agent answers. An existing box of that id is success;
    /// leftovers of an interrupted attempt are removed first. On failure nothing is left.
    /// A specification with a [`Standby`](crate::pool::Standby) mark makes a box whose agent starts nothing and answers nobody until it is
    /// [assigned](Runtime::assign).
    async fn start(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        secrets: &Secrets,
    ) -> Result<Observation, RuntimeError>;

    /// Makes the sandbox of `plan` out of a box of the same id that was started with a [`Standby`](crate::pool::Standby) mark, and returns
    /// when its entrypoint was started. Image, limits, network and volumes of the box stay; entrypoint, environment, hooks, tokens and
    /// facts become those of the plan. To be repeated with the same plan after a crash at any point; a box that was assigned is success.
    /// `NotFound` without such a box. After another failure the box is of no use to anybody and is to be removed.
    async fn assign(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError>;

    /// What the reference of an image that is present stands for now: a text that differs when the content does. Empty when the runtime
    /// cannot tell or the image is absent.
    async fn image_identity(&self, image: &str) -> Result<String, RuntimeError>;

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

    /// The name its artifact will have: what a sandbox restored from the snapshot takes as its image.
    fn snapshot_image(&self, snapshot: SnapshotId) -> String;

    /// Saves the box's file system as the artifact of `snapshot` and returns when it can be restored from. An artifact that exists is success.
    async fn snapshot(&self, id: SandboxId, snapshot: SnapshotId) -> Result<(), RuntimeError>;

    /// Whether the artifact exists and is whole.
    async fn has_snapshot(&self, snapshot: SnapshotId) -> Result<bool, RuntimeError>;

    /// Whether the artifact may still come without anybody's doing: what makes it goes on for a server that has ended.
    async fn still_saves(&self, snapshot: SnapshotId) -> bool;

    /// Removes the artifact. Absent is success; `InUse` while a box is made from it.
    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), RuntimeError>;
}
