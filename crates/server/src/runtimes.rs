//! From the configuration to a runtime: which one, and with what settings.
//!
//! The only place where a configuration section becomes a backend's own settings.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandglass_runtimes::{
    docker::{self, DockerRuntime, EngineAddress},
    embedded::{self, EmbeddedConfig, EmbeddedRuntime, Subnet},
    enforcement,
};
use sandglass_sandbox::{
    breaker,
    ports::{Captures, Dockerfiles, Runtime, runtime::RuntimeError},
    spec::Limits,
};
use tracing::warn;

use crate::{
    config::{self, Config, EngineBuilder, Quantity, RuntimeKind, SecureRuntimeKind, SubnetChoice},
    engine::Settings,
    http::images::Images,
};

/// How long a create waits on an engine before it is answered `Pending`: clients give up after thirty seconds, and the older ones do not
/// know how to wait for a pending sandbox.
const DOCKER_CREATE_GRACE: Duration = Duration::from_secs(10);
/// Creates that an engine works on at the same time; it has a queue of its own, so more would only be noise there.
const PARALLEL_DOCKER_STARTS: usize = 32;

/// Why there is no runtime to serve with. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("runtime.type = \"{0}\" is not available in this version; use \"embedded\" or \"docker\"")]
    Unsupported(&'static str),
    #[error("the {runtime} runtime cannot start, failed in phase {}: {}", .error.phase, .error.message)]
    Failed { runtime: &'static str, error: RuntimeError },
}

/// A runtime that is ready for use.
pub struct Opened {
    pub runtime: Arc<dyn Runtime>,
    /// Where the runtime keeps images of its own.
    pub images: Option<Images>,
    /// How boxes become images, for builds.
    pub captures: Arc<dyn Captures>,
    /// Its own builder of Dockerfiles, where it has one.
    pub dockerfiles: Option<Arc<dyn Dockerfiles>>,
    backend: Backend,
}

enum Backend {
    Embedded(Arc<EmbeddedRuntime>),
    Docker(Arc<DockerRuntime>),
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("runtime", &self.runtime.name()).finish_non_exhaustive()
    }
}

/// The machine that the sandboxes run on, when it is not this one.
#[must_use]
pub fn engine_host(config: &Config) -> Option<String> {
    let docker = config.runtime.kind == RuntimeKind::Docker;
    let engine = docker.then(EngineAddress::from_environment)?.ok()?;
    engine.remote_host().map(str::to_owned)
}

/// Where a server keeps what belongs to its image builds.
#[must_use]
pub fn builds_folder(config: &Config) -> PathBuf {
    match config.runtime.kind {
        RuntimeKind::Embedded => config.embedded.state_dir.join("builds"),
        RuntimeKind::Docker | RuntimeKind::Kubernetes => beside_store(config).join("sandglass/builds"),
    }
}

/// Beside the database: the user who runs the server may write there.
fn beside_store(config: &Config) -> &Path {
    config.store.path.parent().unwrap_or_else(|| Path::new("/var/lib/sandglass"))
}

/// Opens the configured runtime. Blocking.
///
/// # Errors
/// When this version lacks it, or the machine or its state directory is not fit.
pub fn open(config: &Config) -> Result<Opened, OpenError> {
    let failed = |runtime| move |error| OpenError::Failed { runtime, error };
    match config.runtime.kind {
        RuntimeKind::Embedded => {
            let runtime =
                Arc::new(EmbeddedRuntime::open(embedded_settings(config)).map_err(failed("embedded"))?);
            let images = images(&runtime, &config.embedded.state_dir);
            Ok(Opened {
                runtime: runtime.clone(),
                images: Some(images),
                captures: runtime.clone(),
                dockerfiles: None,
                backend: Backend::Embedded(runtime),
            })
        }
        RuntimeKind::Docker => {
            let engine = EngineAddress::from_environment().map_err(failed("docker"))?;
            let home = std::env::var_os("HOME").map(PathBuf::from);
            let settings = docker(config, engine, home.as_deref());
            let engine_builds = engine_builds(config);
            let runtime = Arc::new(DockerRuntime::open(settings).map_err(failed("docker"))?);
            Ok(Opened {
                runtime: runtime.clone(),
                images: None,
                captures: runtime.clone(),
                dockerfiles: engine_builds.then(|| runtime.clone() as Arc<dyn Dockerfiles>),
                backend: Backend::Docker(runtime),
            })
        }
        RuntimeKind::Kubernetes => Err(OpenError::Unsupported("kubernetes")),
    }
}

/// Whether the engine's builder gets Dockerfiles. It knows no other runtime than the engine's own, and confines what it runs in Docker's way.
fn engine_builds(config: &Config) -> bool {
    match config.builds.engine_builder {
        _ if secure_runtime(config).is_some() => false,
        EngineBuilder::Auto => !config.docker.confines_further(),
        EngineBuilder::Always => true,
        EngineBuilder::Never => false,
    }
}

/// A few words about the configured Docker engine, for people who have not started a server on it yet.
///
/// # Errors
/// Why no server would be of use on it.
pub async fn about_engine(config: &Config) -> Result<String, String> {
    // Nothing is to stay of a question.
    let scratch = tempfile::tempdir().map_err(|error| format!("no temporary directory: {error}"))?;
    let settings = |engine| docker::DockerConfig {
        state_dir: scratch.path().to_path_buf(),
        ..docker(config, engine, None)
    };
    let about = async {
        let runtime = DockerRuntime::open(settings(EngineAddress::from_environment()?))?;
        runtime.check().await?;
        runtime.about().await
    };
    about.await.map_err(|error| error.message)
}

impl Opened {
    /// What the engine works by on this runtime.
    #[must_use]
    pub fn settings(&self, config: &Config) -> Settings {
        let usual = Settings {
            provision_deadline: config.workspaces.provision_deadline,
            failed_box_retention: config.workspaces.failed_retention,
            breaker: breaker::Limits {
                failures: config.workspaces.breaker_failures,
                window: config.workspaces.breaker_window,
                open: config.workspaces.breaker_open,
                probe: config.workspaces.provision_deadline,
            },
            ..Settings::default()
        };
        match self.backend {
            Backend::Embedded(_) => Settings {
                create_grace: config.embedded.create_grace,
                max_sandboxes: config.embedded.max_sandboxes.unwrap_or(0),
                ..usual
            },
            Backend::Docker(_) => Settings {
                create_grace: DOCKER_CREATE_GRACE,
                parallel_starts: PARALLEL_DOCKER_STARTS,
                ..usual
            },
        }
    }

    /// What only a runtime that answers can tell. One that does not answer is no reason not to serve.
    ///
    /// # Errors
    /// When the runtime lacks what the configuration asks of it.
    pub async fn check(&self) -> Result<(), OpenError> {
        let Backend::Docker(runtime) = &self.backend else { return Ok(()) };
        match runtime.check().await {
            Err(error) if error.retryable() => {
                warn!(%error, "the Docker engine cannot be reached; serving until it comes");
                Ok(())
            }
            checked => checked.map_err(|error| OpenError::Failed { runtime: "docker", error }),
        }
    }

    /// Tidies up what only running sandboxes need, when there are none.
    pub fn leave(&self) {
        if let Backend::Embedded(runtime) = &self.backend
            && let Err(error) = runtime.remove_network()
        {
            warn!(%error, "the host-side network could not be removed");
        }
    }
}

fn embedded_settings(config: &Config) -> EmbeddedConfig {
    let embedded = &config.embedded;
    EmbeddedConfig {
        state_dir: embedded.state_dir.clone(),
        host_image: config.offers_host_image(),
        subnet: match embedded.subnet {
            SubnetChoice::Auto => None,
            SubnetChoice::Fixed(net) => Some(Subnet { address: net.address(), prefix_len: net.prefix() }),
        },
        dns: embedded.dns.clone(),
        pids_limit: embedded.pids_limit,
        expiry_grace: embedded.expiry_grace,
        insecure_registries: embedded.insecure_registries.clone(),
        egress: embedded_egress(&config.egress),
    }
}

fn embedded_egress(egress: &config::EgressConfig) -> embedded::EgressConfig {
    let limits = limits(&egress.limits);
    embedded::EgressConfig {
        readiness_timeout: egress.readiness_timeout,
        otlp_endpoint: egress.otlp_endpoint.as_ref().map(|endpoint| endpoint.expose().to_owned()),
        upstream_proxy: egress.upstream_proxy.as_ref().map(upstream_proxy),
        memory_bytes: limits.memory_bytes,
        cpu_millis: limits.cpu_millis,
    }
}

fn upstream_proxy(proxy: &config::UpstreamProxyConfig) -> enforcement::UpstreamProxy {
    enforcement::UpstreamProxy {
        url: proxy.url.clone(),
        authorization: proxy.authorization.as_ref().map(|secret| secret.expose().to_owned()),
        ca_cert_path: proxy.ca_cert_path.as_ref().map(PathBuf::from),
    }
}

fn images(runtime: &EmbeddedRuntime, state_dir: &Path) -> Images {
    let uploads = state_dir.join("uploads");
    // What a killed server left half uploaded is of no use.
    let _ = std::fs::remove_dir_all(&uploads);
    if let Err(error) = std::fs::create_dir_all(&uploads) {
        warn!(%error, "there is no room for image uploads");
    }
    Images { store: runtime.images().clone(), uploads, in_use: Arc::new(runtime.image_users()) }
}

/// Where this server keeps files of its own beside its database.
#[must_use]
pub fn state_dir(config: &Config) -> PathBuf {
    match config.runtime.kind {
        RuntimeKind::Embedded => config.embedded.state_dir.clone(),
        RuntimeKind::Docker | RuntimeKind::Kubernetes => beside_store(config).join("sandglass"),
    }
}

fn docker(config: &Config, engine: EngineAddress, home: Option<&Path>) -> docker::DockerConfig {
    let settings = &config.docker;
    let beside = beside_store(config);
    // Where other servers of this API on the same engine look for them too.
    let shared = home.map_or_else(|| beside.to_path_buf(), |home| home.join(".opensandbox"));
    docker::DockerConfig {
        engine,
        state_dir: beside.join("sandglass"),
        side_facts_dir: shared.join("metadata"),
        network_mode: settings.network_mode.clone(),
        api_timeout: settings.api_timeout,
        host_ip: settings.host_ip.clone(),
        server_host: config.server.host.clone(),
        drop_capabilities: settings.drop_capabilities.clone(),
        apparmor_profile: settings.apparmor_profile.clone(),
        seccomp_profile: settings.seccomp_profile.clone(),
        no_new_privileges: settings.no_new_privileges,
        pids_limit: Some(settings.pids_limit),
        ports: settings.port_range_min..=settings.port_range_max,
        publish_host: settings.publish_host,
        reaches_containers: config.proxy.resolve_internal,
        sandbox_binds: settings.sandbox_binds.clone(),
        ulimits: Vec::new(),
        egress: egress(config),
        secure_runtime: secure_runtime(config),
        run_as_init: config.runtime.execd_run_as_init,
        allowed_host_paths: allowed_host_paths(&config.storage.allowed_host_paths),
        ossfs_mount_root: config.storage.ossfs_mount_root.clone(),
        execd_image: config.runtime.execd_image.clone(),
    }
}

fn egress(config: &Config) -> docker::EgressConfig {
    let egress = &config.egress;
    docker::EgressConfig {
        image: egress.image.clone(),
        mode: egress.mode.to_string(),
        limits: limits(&egress.limits),
        disable_ipv6: egress.disable_ipv6,
        otlp_endpoint: egress.otlp_endpoint.as_ref().map(|endpoint| endpoint.expose().to_owned()),
        readiness_timeout: egress.readiness_timeout,
        upstream_proxy: egress.upstream_proxy.as_ref().map(upstream_proxy),
    }
}

/// The limits that a container can have; others are for Kubernetes.
fn limits(configured: &BTreeMap<String, Quantity>) -> Limits {
    let units = |name: &str, nanos: i128| {
        let quantity = configured.get(name)?;
        u64::try_from(quantity.nanos() / nanos).ok().filter(|units| *units > 0)
    };
    Limits {
        cpu_millis: units("cpu", 1_000_000),
        memory_bytes: units("memory", 1_000_000_000),
        pids: units("pids", 1_000_000_000),
        ..Limits::default()
    }
}

/// The name that engines usually know the boundary by, unless the operator gave another.
fn secure_runtime(config: &Config) -> Option<String> {
    let usual = match config.secure_runtime.kind {
        SecureRuntimeKind::None | SecureRuntimeKind::Firecracker => return None,
        SecureRuntimeKind::Gvisor => "runsc",
        SecureRuntimeKind::Kata => "kata-runtime",
    };
    Some(config.secure_runtime.docker_runtime.clone().unwrap_or_else(|| usual.to_owned()))
}

/// A prefix that is a link counts as what it points to as well, because paths are compared after they were resolved.
fn allowed_host_paths(written: &[PathBuf]) -> Vec<PathBuf> {
    let resolved = written.iter().filter_map(|path| std::fs::canonicalize(path).ok());
    let mut all: Vec<PathBuf> = written.iter().cloned().chain(resolved).collect();
    all.sort_unstable();
    all.dedup();
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Secret, UpstreamProxyConfig};

    fn run(change: impl FnOnce(&mut Config)) -> docker::DockerConfig {
        let mut config = Config::default();
        config.runtime.kind = RuntimeKind::Docker;
        config.store.path = PathBuf::from("/home/op/.opensandbox/opensandbox.db");
        change(&mut config);
        let engine = EngineAddress::parse(Some("unix:///tmp/engine.sock"), None).unwrap();
        docker(&config, engine, Some(Path::new("/home/op")))
    }

    #[test]
    fn the_configuration_reaches_the_docker_runtime() {
        let seen = run(|config| {
            config.docker.network_mode = "bridge".to_owned();
            config.docker.sandbox_binds = vec!["/a:/b".to_owned()];
            config.egress.image = Some("egress:1".to_owned());
            for (name, value) in [("cpu", "250m"), ("memory", "64Mi"), ("ephemeral-storage", "1Gi")] {
                config.egress.limits.insert(name.to_owned(), Quantity::parse(value).unwrap());
            }
            config.egress.upstream_proxy = Some(UpstreamProxyConfig {
                url: "http://proxy".to_owned(),
                authorization: Some(Secret::new("Basic hunter2")),
                ..UpstreamProxyConfig::default()
            });
            config.runtime.execd_image = Some("execd:1".to_owned());
        });
        assert_eq!(seen.state_dir, Path::new("/home/op/.opensandbox/sandglass"));
        assert_eq!(seen.side_facts_dir, Path::new("/home/op/.opensandbox/metadata"));
        assert_eq!((seen.ports.start(), seen.ports.end()), (&40_000, &60_000));
        assert_eq!((seen.network_mode.as_str(), seen.pids_limit), ("bridge", Some(4096)));
        assert_eq!((seen.egress.mode.as_str(), seen.egress.image.as_deref()), ("dns", Some("egress:1")));
        let limits = seen.egress.limits;
        assert_eq!((limits.cpu_millis, limits.memory_bytes, limits.pids), (Some(250), Some(64 << 20), None));
        assert!(seen.reaches_containers);
        assert_eq!(seen.execd_image.as_deref(), Some("execd:1"));
        let proxy = seen.egress.upstream_proxy.as_ref().unwrap();
        assert_eq!(proxy.authorization.as_deref(), Some("Basic hunter2"));
        assert!(!format!("{seen:?}").contains("hunter2"));
    }

    #[test]
    fn the_engines_builder_is_used_while_sandboxes_are_confined_as_by_default() {
        let builds = |set: fn(&mut Config)| {
            let mut config = Config::default();
            set(&mut config);
            engine_builds(&config)
        };
        assert!(builds(|_| {}));
        assert!(builds(|config| config.docker.drop_capabilities = vec!["cap_mknod".to_owned()]));
        assert!(!builds(|config| config.docker.drop_capabilities.push("CHOWN".to_owned())));
        assert!(!builds(|config| config.docker.pids_limit = 100));
        assert!(!builds(|config| config.docker.seccomp_profile = Some("/a.json".to_owned())));
        assert!(!builds(|config| config.docker.apparmor_profile = Some("a".to_owned())));
        assert!(!builds(|config| config.builds.engine_builder = EngineBuilder::Never));
        assert!(builds(|config| {
            config.builds.engine_builder = EngineBuilder::Always;
            config.docker.pids_limit = 100;
        }));
        assert!(!builds(|config| {
            config.builds.engine_builder = EngineBuilder::Always;
            config.secure_runtime.kind = SecureRuntimeKind::Gvisor;
        }));
    }

    #[test]
    fn secure_runtimes_have_usual_names() {
        let named = |kind, name: Option<&str>| {
            run(|config| {
                config.secure_runtime.kind = kind;
                config.secure_runtime.docker_runtime = name.map(str::to_owned);
            })
            .secure_runtime
        };
        assert_eq!(named(SecureRuntimeKind::None, None), None);
        assert_eq!(named(SecureRuntimeKind::Gvisor, None).as_deref(), Some("runsc"));
        assert_eq!(named(SecureRuntimeKind::Kata, None).as_deref(), Some("kata-runtime"));
        assert_eq!(named(SecureRuntimeKind::Gvisor, Some("gv")).as_deref(), Some("gv"));
    }

    #[test]
    fn allowed_links_count_as_their_targets_too() {
        let dir = tempfile::tempdir().unwrap();
        let (real, link) = (dir.path().join("real"), dir.path().join("link"));
        std::fs::create_dir(&real).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        let seen = allowed_host_paths(&[link.clone(), PathBuf::from("/nowhere/at/all")]);
        let real = std::fs::canonicalize(real).unwrap();
        assert!(seen.contains(&link) && seen.contains(&real) && seen.len() == 3, "{seen:?}");
    }
}
