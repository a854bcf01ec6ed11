//! What was asked for. A `Spec` exists only after the API edge has parsed and checked every value in it.

use std::{collections::BTreeMap, fmt, path::PathBuf};

use serde::{Deserialize, Serialize};

use crate::{
    hooks::Hooks, ids::SnapshotId, policy::Policies, pool::Standby, source::RepositorySource, time::Timestamp,
};

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

/// What opens an object-store volume. Never persisted, never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct ObjectStoreKey {
    pub id: String,
    pub secret: String,
}

impl fmt::Debug for ObjectStoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ObjectStoreKey(***)")
    }
}

/// What a request carries that only the memory of this process may hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets {
    pub registry: Option<Credentials>,
    /// By the name of the volume.
    pub object_stores: BTreeMap<String, ObjectStoreKey>,
}

impl Secrets {
    /// Whether the request carried none.
    pub fn is_empty(&self) -> bool {
        self.registry.is_none() && self.object_stores.is_empty()
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
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<Gpu>,
    /// Bytes of disk; only virtual machines have one of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// Graphics processors.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Gpu {
    All,
    /// At least 1.
    Count(u32),
}

/// Something from outside made visible inside.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    pub name: String,
    pub source: VolumeSource,
    /// Absolute, without `..`.
    pub target: PathBuf,
    pub read_only: bool,
}

/// Where a volume comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "kind")]
pub enum VolumeSource {
    /// A file or directory of the host, sub-path included, already checked against the allowed prefixes.
    Host { path: PathBuf },
    /// A volume that the runtime knows by name.
    Named {
        claim: String,
        /// Relative, without `..`.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        sub_path: Option<PathBuf>,
        create_if_missing: bool,
        /// Remove it with the sandbox, if this sandbox's create made it.
        delete_with_sandbox: bool,
    },
    /// A bucket that is mounted on the host; its key is in [`Secrets::object_stores`].
    ObjectStore {
        bucket: String,
        endpoint: String,
        /// Major version of the mounting program: 1 or 2.
        version: u8,
        options: Vec<String>,
        #[serde(skip_serializing_if = "Option::is_none", default)]
        sub_path: Option<PathBuf>,
    },
}

/// What the sandbox may reach, in the egress sidecar's own vocabulary.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicy {
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub default_action: Option<String>,
    #[serde(default)]
    pub egress: Vec<EgressRule>,
}

/// One rule of a [`NetworkPolicy`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EgressRule {
    pub action: String,
    pub target: String,
}

/// A network policy and what its enforcer is told beside it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Egress {
    pub policy: NetworkPolicy,
    /// Secrets are injected into outgoing requests.
    pub credential_proxy: bool,
    /// The enforcer's own environment, as asked for.
    pub env: Vec<(String, String)>,
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
    pub volumes: Vec<Volume>,
    /// The extensions as asked for; which of them are echoed is the API's business.
    pub extensions: BTreeMap<String, String>,
    pub secure_access: bool,
    /// Restored from this snapshot; `image` is then the snapshot's artifact.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Egress>,
    /// Who it belongs to; `None` on a server without tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    #[serde(default, skip_serializing_if = "Hooks::is_empty")]
    pub hooks: Hooks,
    /// Made from a repository; `image` is empty until one was found for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<Box<RepositorySource>>,
    /// What happens when it is not used, or its time is over; `None`: it goes when its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<Policies>,
    /// The box waits in a pool and is no sandbox yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub standby: Option<Standby>,
}

impl Spec {
    /// A specification with nothing but an image and what to run.
    pub fn new(image: impl Into<String>, entrypoint: Entrypoint) -> Self {
        Self {
            image: image.into(),
            entrypoint,
            env: Vec::new(),
            limits: Limits::default(),
            platform: None,
            volumes: Vec::new(),
            extensions: BTreeMap::new(),
            secure_access: false,
            snapshot: None,
            egress: None,
            tenant: None,
            hooks: Hooks::default(),
            source: None,
            policies: None,
            standby: None,
        }
    }
}

/// The two facts about a sandbox that may change while it lives.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MutableFacts {
    /// `None`: manual cleanup, the sandbox never expires.
    pub expires_at: Option<Timestamp>,
    pub metadata: BTreeMap<String, String>,
}
