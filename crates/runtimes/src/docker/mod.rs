//! The Docker runtime: boxes are containers of a Docker engine, which is spoken to over its HTTP API.
//!
//! Owns the way from a sandbox to its container, sidecar, volumes and ports, and back. It keeps nothing about a box: the container and its
//! labels are the record, small side files hold what labels cannot (`side_facts.rs`). Invariant: whatever is made for a box can be found
//! again by the box's id alone, so that a server that died in between leaves nothing that its successor cannot remove.

mod agent;
mod assigned;
mod audit;
mod capture;
mod client;
mod container;
mod delivery;
mod dockerfile;
mod enforcer;
mod errors;
mod freeze;
mod host_config;
mod image;
mod labels;
#[cfg(test)]
mod live_egress_tests;
#[cfg(test)]
mod live_network_tests;
#[cfg(test)]
mod live_pull_tests;
#[cfg(test)]
mod live_tests;
mod lost;
mod network;
mod object_stores;
mod observe;
mod pins;
mod ports;
mod reach;
mod reads;
mod remove;
mod requirements;
mod runtime;
mod saves;
mod side_facts;
mod sidecar;
mod snapshot;
mod start;
mod sweep;
mod volumes;
mod watch;
mod windows;

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    ops::RangeInclusive,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
    spec::Limits,
};

use crate::enforcement::UpstreamProxy;

pub use client::EngineAddress;

/// What the Docker runtime needs to know.
#[derive(Debug, Clone)]
pub struct DockerConfig {
    pub engine: EngineAddress,
    /// Where the agent is unpacked to.
    pub state_dir: PathBuf,
    /// Where renewed expiries and patched metadata are kept; shared with other servers on the same engine.
    pub side_facts_dir: PathBuf,
    /// `host`, `bridge` or the name of a network of the engine.
    pub network_mode: String,
    /// Longest wait for one call of the engine, pulls and commits excepted.
    pub api_timeout: Duration,
    /// The host of published ports as this server must spell it when it runs in a container.
    pub host_ip: Option<String>,
    /// The host this server listens on.
    pub server_host: String,
    pub drop_capabilities: Vec<String>,
    /// `None`: the engine's own.
    pub apparmor_profile: Option<String>,
    /// A word that the engine knows, or the path of a file; `None`: the engine's own.
    pub seccomp_profile: Option<String>,
    pub no_new_privileges: bool,
    /// Processes and threads of a box that asks for nothing else.
    pub pids_limit: Option<u64>,
    /// Where host ports are taken from.
    pub ports: RangeInclusive<u16>,
    /// The host address that ports are published on.
    pub publish_host: Ipv4Addr,
    /// Whether this server reaches containers at their own addresses, where the engine is on the same machine.
    pub reaches_containers: bool,
    /// Binds of every box, `source:target[:mode]`.
    pub sandbox_binds: Vec<String>,
    /// Limits of every box, `name=soft[:hard]`.
    pub ulimits: Vec<String>,
    pub egress: EgressConfig,
    /// The name of the engine's runtime that runs the boxes; `None`: the engine's default.
    pub secure_runtime: Option<String>,
    /// Boxes are told that the agent is their first process. It always is.
    pub run_as_init: bool,
    /// Host paths outside these prefixes are not mounted; none at all when empty.
    pub allowed_host_paths: Vec<PathBuf>,
    /// Buckets are mounted below it.
    pub ossfs_mount_root: PathBuf,
    /// Where Windows boxes get their agent from.
    pub execd_image: Option<String>,
}

/// How the egress sidecar is run.
#[derive(Debug, Clone)]
pub struct EgressConfig {
    /// An image of the operator's; `None`: this program's own enforcer.
    pub image: Option<String>,
    /// `dns` or `dns+nft`, for an image of the operator's.
    pub mode: String,
    /// What the sidecar may use at most.
    pub limits: Limits,
    pub disable_ipv6: bool,
    pub otlp_endpoint: Option<String>,
    pub readiness_timeout: Duration,
    pub upstream_proxy: Option<UpstreamProxy>,
}

/// See the module documentation.
pub struct DockerRuntime {
    shared: Arc<Shared>,
}

/// What all verbs share; their code is spread over the files of this folder.
struct Shared {
    config: DockerConfig,
    client: client::Client,
    agent: agent::Agent,
    /// The content of the configured seccomp profile, or the engine's word for one.
    seccomp: Option<String>,
    ports: ports::Ports,
    pins: pins::Pins,
    /// What `prepare` learnt, for the `start` that follows.
    images: image::Prepared,
    own_image: enforcer::OwnImage,
    /// The engine's own platform, once it was asked.
    engine_platform: tokio::sync::OnceCell<image::Expected>,
    /// The agent for Windows, packed for upload, once it was read from its image.
    windows_artifacts: tokio::sync::OnceCell<bytes::Bytes>,
    object_stores: object_stores::ObjectStores,
    side_facts: side_facts::SideFacts,
    assigned: assigned::Assigned,
    memory: observe::Memory,
    locks: freeze::Locks,
    saves: saves::Saves,
    watching: watch::Watching,
    /// Boxes that were seen and not seen to go; a full list finds what vanished from it.
    known: Mutex<BTreeSet<SandboxId>>,
    /// Ids that are being made right now; a full list leaves them to their maker.
    making: Mutex<BTreeSet<SandboxId>>,
    revision: AtomicU64,
}

/// What was made for a box before its container, and must be found again with it: its labels name it.
#[derive(Debug, Clone, Default)]
struct Made {
    /// `None` on the host's network.
    published: Option<Published>,
    /// Named volumes that go with the box, the runtime volume included.
    volumes: Vec<String>,
    /// Mount points of buckets on this host.
    object_stores: Vec<PathBuf>,
    /// Whether there may be a container of this attempt.
    container: bool,
    /// Whether there is a sidecar, and with it a runtime volume.
    sidecar: bool,
    egress_token: Option<String>,
}

/// Host ports that lead to a box.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Published {
    agent: u16,
    http: u16,
    /// Of its egress sidecar.
    egress: Option<u16>,
}

impl std::fmt::Debug for DockerRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DockerRuntime").field("engine", &self.shared.config.engine).finish_non_exhaustive()
    }
}

impl DockerRuntime {
    /// Unpacks the agent. The engine need not be up: every call connects when it must, and says so when it cannot.
    ///
    /// # Errors
    /// When the state directory cannot be used or the configuration names files that cannot be read.
    pub fn open(config: DockerConfig) -> Result<Self, RuntimeError> {
        let seccomp = host_config::seccomp(&config)?;
        host_config::check(&config)?;
        let agent = agent::Agent::unpack(&config).map_err(|e| {
            RuntimeError::new(RuntimeErrorKind::Failed, "state-dir", format!("cannot unpack the agent: {e}"))
        })?;
        object_stores::forget_keys(&config.state_dir).map_err(|e| {
            errors::failed("state-dir", format!("cannot remove keys that were left behind: {e}"))
        })?;
        let saves = saves::Saves::open(saves::dir(&config.state_dir)).map_err(|e| {
            errors::failed("state-dir", format!("cannot read which sandboxes are being saved: {e}"))
        })?;
        Ok(Self {
            shared: Arc::new(Shared {
                client: client::Client::new(config.engine.clone(), config.api_timeout),
                agent,
                seccomp,
                pins: pins::Pins::new(config.state_dir.join("pins")),
                ports: ports::Ports::new(config.ports.clone(), config.publish_host),
                images: image::Prepared::default(),
                own_image: enforcer::OwnImage::default(),
                engine_platform: tokio::sync::OnceCell::new(),
                windows_artifacts: tokio::sync::OnceCell::new(),
                object_stores: object_stores::ObjectStores::default(),
                side_facts: side_facts::SideFacts::new(&config.side_facts_dir),
                assigned: assigned::Assigned::new(&config.state_dir),
                memory: observe::Memory::default(),
                locks: freeze::Locks::default(),
                saves,
                watching: watch::Watching::default(),
                known: Mutex::default(),
                making: Mutex::default(),
                revision: AtomicU64::new(1),
                config,
            }),
        })
    }
}

impl Shared {
    fn known(&self) -> MutexGuard<'_, BTreeSet<SandboxId>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn making(&self) -> MutexGuard<'_, BTreeSet<SandboxId>> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the next observation.
    fn next_revision(&self) -> u64 {
        self.revision.fetch_add(1, Ordering::Relaxed)
    }
}
