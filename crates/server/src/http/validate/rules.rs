//! What the configuration and the chosen runtime accept, gathered once at the start.

use std::{path::PathBuf, time::Duration};

use sandglass_sandbox::ports::runtime::Capabilities;

use crate::config::{Config, EgressMode, RuntimeKind, Secret, SecureRuntimeKind};

const MIB: u64 = 1 << 20;

/// What a create may ask for.
#[derive(Clone, Debug)]
pub struct CreateRules {
    pub max_timeout: Option<Duration>,
    pub allowed_host_paths: Vec<PathBuf>,
    /// Whether volumes of the host are files of this machine, so that they can be looked at and made.
    pub host_files_are_here: bool,
    /// The server's own architecture: the only one that runs here unless the runtime knows others.
    pub arch: &'static str,
    pub runtime: RuntimeRules,
}

/// What the runtime accepts.
#[derive(Clone, Debug)]
pub struct RuntimeRules {
    /// For messages.
    pub name: &'static str,
    pub capabilities: Capabilities,
    /// Every port of a sandbox is a port of the host, without the server.
    pub shares_ports: bool,
    /// Less than this cannot work.
    pub least_memory: u64,
    pub least_cpu_millis: u64,
    /// Environment of every sandbox. Secrets, because tokens are what people put there.
    pub base_env: Vec<(String, Secret)>,
    /// `None`: there are no network policies.
    pub policies: Option<PolicyRules>,
}

/// What network policies need beside a runtime that knows them.
#[derive(Clone, Debug)]
pub struct PolicyRules {
    pub network: Network,
    /// The operator named an image; without one the server's own enforcer is used, which can do everything.
    pub has_image: bool,
    /// What the image is told to do.
    pub mode: EgressMode,
    /// Sandboxes run on gVisor, whose network stack the enforcer cannot filter.
    pub gvisor: bool,
    /// The sidecar sends everything through a proxy.
    pub upstream_proxy: bool,
}

impl PolicyRules {
    /// Of a runtime with an enforcer of its own, which needs no image and always enforces names and addresses.
    fn own(upstream_proxy: bool) -> Self {
        Self {
            network: Network::Bridge,
            has_image: false,
            mode: EgressMode::DnsNft,
            gvisor: false,
            upstream_proxy,
        }
    }
}

/// Which network containers are in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Network {
    Host,
    Bridge,
    Named(String),
}

impl Network {
    /// From `docker.network_mode`.
    #[must_use]
    pub fn of(mode: &str) -> Self {
        match mode {
            "host" => Self::Host,
            "bridge" => Self::Bridge,
            name => Self::Named(name.to_owned()),
        }
    }
}

impl CreateRules {
    /// From the configuration and what the runtime says of itself.
    #[must_use]
    pub fn of(config: &Config, name: &'static str, capabilities: Capabilities) -> Self {
        let docker = config.runtime.kind == RuntimeKind::Docker;
        let base_env = if docker { config.docker.sandbox_env.clone() } else { Default::default() };
        let upstream_proxy = config.egress.upstream_proxy.is_some();
        let policies = match config.runtime.kind {
            RuntimeKind::Docker => Some(PolicyRules {
                network: Network::of(&config.docker.network_mode),
                has_image: config.egress.image.is_some(),
                mode: config.egress.mode,
                gvisor: config.secure_runtime.kind == SecureRuntimeKind::Gvisor,
                upstream_proxy,
            }),
            RuntimeKind::Embedded => Some(PolicyRules::own(upstream_proxy)),
            RuntimeKind::Kubernetes => None,
        };
        Self {
            max_timeout: config.server.max_sandbox_timeout,
            allowed_host_paths: config.storage.allowed_host_paths.clone(),
            host_files_are_here: true,
            arch: if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
            runtime: RuntimeRules {
                name,
                capabilities,
                shares_ports: docker && Network::of(&config.docker.network_mode) == Network::Host,
                // Engines refuse less; the agent alone needs about half of it.
                least_memory: 6 * MIB,
                // Engines refuse less than a hundredth of a processor.
                least_cpu_millis: if docker { 10 } else { 1 },
                base_env: base_env.into_iter().collect(),
                policies,
            },
        }
    }
}

/// Rules for tests: a runtime that can do everything, or the embedded one.
#[cfg(test)]
impl CreateRules {
    pub(crate) fn embedded() -> Self {
        let none = Capabilities {
            pause: true,
            snapshot: false,
            gpu: false,
            network_policy: true,
            named_volumes: false,
            object_store_volumes: false,
            foreign_platforms: false,
            sockets: true,
            standby: true,
        };
        Self { arch: "amd64", ..Self::of(&Config::default(), "embedded", none) }
    }

    pub(crate) fn docker(change: impl FnOnce(&mut Config)) -> Self {
        let all = Capabilities {
            pause: true,
            snapshot: true,
            gpu: true,
            network_policy: true,
            named_volumes: true,
            object_store_volumes: true,
            foreign_platforms: true,
            sockets: true,
            standby: true,
        };
        let mut config = Config::default();
        config.runtime.kind = RuntimeKind::Docker;
        config.docker.network_mode = "bridge".to_owned();
        config.egress.image = Some("egress".to_owned());
        change(&mut config);
        Self { arch: "amd64", ..Self::of(&config, "docker", all) }
    }
}
