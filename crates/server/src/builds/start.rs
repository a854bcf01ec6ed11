//! Puts the builds of a server together.

use std::{
    fs, io,
    net::IpAddr,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use sandglass_builds::{
    driver::{Ports, Settings, Takeover},
    logs::{DiskLogs, Limits as LogLimits},
    ports::{BuildStore, Silent, StoreError},
};
use sandglass_repository::{HostAllowList, Policy, WorkspaceRoot};
use sandglass_sandbox::{
    Clock,
    ports::{Captures, Dockerfiles, Runtime},
    spec::Limits,
};
use tracing::warn;

use super::{
    Builds, Inner,
    engine::{EngineSettings, SandboxEngine},
    git,
    inside::{Agents, Inside},
    layers::Layers,
    locate::Locator,
    prebuilds::PrebuildResolver,
    pushes::WebhookSecrets,
    redaction::Redaction,
    vault::DiskVault,
};
use crate::config::{BuildsConfig, Quantity};

/// A build sandbox outlives its build's longest time by this.
const AFTERWARDS: Duration = Duration::from_secs(1800);

/// Everything that builds need of a server.
#[derive(Clone)]
pub struct Parts {
    pub store: Arc<dyn BuildStore>,
    pub runtime: Arc<dyn Runtime>,
    pub captures: Arc<dyn Captures>,
    /// The runtime's own builder of Dockerfiles, where it has one.
    pub dockerfiles: Option<Arc<dyn Dockerfiles>>,
    /// `None`: through the sandboxes' agents.
    pub inside: Option<Arc<dyn Inside>>,
    pub clock: Arc<dyn Clock>,
    pub config: BuildsConfig,
    /// For mirrors, checkouts, logs and secrets; nobody else's.
    pub folder: PathBuf,
    /// Whose ports lead into sandboxes that have no address of their own.
    pub host: IpAddr,
    /// Whether other servers may work on the same store.
    pub shared_store: bool,
    /// Of secrets that requests name; `None` where there are none.
    pub secrets_dir: Option<PathBuf>,
}

/// Why there are no builds.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the folder of image builds, {}, cannot be used: {source}", .folder.display())]
    Folder { folder: PathBuf, source: io::Error },
    #[error("[builds]: {0}")]
    Config(String),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("no client for build sandboxes: {0}")]
    Client(#[from] reqwest::Error),
}

impl Builds {
    /// Finishes or ends what earlier servers left, then begins to work.
    ///
    /// # Errors
    /// When the folder or the store cannot be used.
    pub async fn start(parts: Parts) -> Result<Self, StartError> {
        let Parts {
            store,
            runtime,
            captures,
            dockerfiles,
            inside,
            clock,
            config,
            folder,
            host,
            shared_store,
            secrets_dir,
        } = parts;
        let policy = policy(&config)?;
        let at = folder.clone();
        let unusable = move |source| StartError::Folder { folder: at, source };
        let (place, checked) = (folder.clone(), policy.clone());
        let (limit, authorities) = (config.repository_limit.bytes(), config.git_authorities.clone());
        let opened =
            tokio::task::spawn_blocking(move || Places::open(&place, checked, limit, authorities)).await;
        let places = opened.map_err(io::Error::other).and_then(|opened| opened).map_err(unusable)?;
        let locator = Arc::new(Locator {
            git: places.git.clone(),
            runtime: runtime.clone(),
            captures: captures.clone(),
            rows: store.clone(),
            dockerfiles: dockerfiles.clone(),
            base_image: config.base_image.clone(),
            platform: platform(),
            timeout: config.resolve_timeout,
            scratch: places.scratch.clone(),
            salt: places.salt.clone(),
            recipes: super::locate::Recipes::default(),
        });
        let inside = match inside {
            Some(inside) => inside,
            None => Arc::new(Agents::new()?),
        };
        let layers = layers(&config, folder.join("layers"), &captures)
            .await
            .map_err(|source| StartError::Folder { folder: folder.join("layers"), source })?;
        let engine = Arc::new(SandboxEngine {
            runtime,
            captures,
            dockerfiles,
            inside,
            git: places.git.clone(),
            clock: clock.clone(),
            settings: EngineSettings {
                limits: limits(&config),
                lifetime: config.max_timeout.saturating_add(AFTERWARDS),
                scratch: places.scratch,
                host,
                builder: super::attempt::builder(&places.salt),
                base_image: config.base_image.clone(),
                layer_after: config.layer_after,
            },
            attempts: super::engine::Attempts::default(),
            layers,
        });
        let logs = Arc::new(DiskLogs::new(folder.join("logs"), LogLimits::default(), clock.clone()));
        let ports = Ports {
            store: store.clone(),
            engine: engine.clone(),
            resolver: Arc::new(PrebuildResolver {
                locator: locator.clone(),
                policy: policy.clone(),
                secrets_dir,
            }),
            logs: logs.clone(),
            filters: Arc::new(Redaction),
            vault: Arc::new(places.vault.clone()),
            observer: Arc::new(Silent),
            clock,
        };
        let settings = settings(&config, shared_store)?;
        let open = store.open_builds(ports.engine.name()).await?;
        engine.remove_forgotten(|id| open.iter().any(|row| row.id.to_string() == id)).await;
        let vault = places.vault;
        let pruned =
            tokio::task::spawn_blocking(move || vault.prune(|id| open.iter().any(|row| row.id == id)));
        if let Ok(Err(error)) = pruned.await {
            warn!(%error, "secrets of builds that are gone stay");
        }
        evict_mirrors(&places.git, config.mirrors_budget.bytes());
        let driver = sandglass_builds::Builds::start(ports, settings).await?;
        let inner = Inner {
            driver,
            store,
            logs,
            locator,
            policy,
            timeout: config.timeout,
            max_timeout: config.max_timeout,
            webhooks: places.webhooks,
        };
        Ok(Self { inner: Arc::new(inner) })
    }
}

/// Where images are made of layers, those that single instructions made are kept.
async fn layers(
    config: &BuildsConfig,
    folder: PathBuf,
    captures: &Arc<dyn Captures>,
) -> io::Result<Option<Layers>> {
    let budget = config.layers_budget.bytes();
    if !captures.layered() {
        return Ok(None);
    }
    // Also when none are kept any more: those that were go.
    let layers = Layers::open(folder, captures.clone(), budget)?;
    layers.prune(None).await;
    Ok((budget > 0).then_some(layers))
}

/// What lies in the folder.
struct Places {
    git: sandglass_repository::git::Git,
    vault: DiskVault,
    webhooks: WebhookSecrets,
    scratch: PathBuf,
    salt: Vec<u8>,
}

impl Places {
    fn open(
        folder: &Path,
        policy: Policy,
        repository_limit: u64,
        authorities: Option<PathBuf>,
    ) -> io::Result<Self> {
        let git = git::open(&folder.join("git"), policy, repository_limit, authorities)?;
        let scratch = folder.join("work");
        // What a killed server left is of no use.
        match fs::remove_dir_all(&scratch) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        fs::DirBuilder::new().mode(0o700).create(&scratch)?;
        Ok(Self {
            git,
            vault: DiskVault::open(folder.join("vault"))?,
            webhooks: WebhookSecrets::open(folder.join("webhooks"))?,
            scratch,
            salt: salt(&folder.join("salt"))?,
        })
    }
}

/// Random bytes that stay the same for this folder.
fn salt(path: &Path) -> io::Result<Vec<u8>> {
    match fs::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        read => return read,
    }
    let parts = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()];
    let salt: Vec<u8> = parts.iter().flat_map(|id| *id.as_bytes()).collect();
    let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    io::Write::write_all(&mut file, &salt)?;
    file.sync_all()?;
    Ok(salt)
}

fn policy(config: &BuildsConfig) -> Result<Policy, StartError> {
    let hosts = HostAllowList::parse(config.allowed_hosts.iter().map(String::as_str));
    Ok(Policy {
        hosts: hosts.map_err(|error| StartError::Config(format!("allowed_hosts: {error}")))?,
        allow_file: config.file_urls,
        allow_http: config.http_urls,
        root: WorkspaceRoot::default(),
    })
}

fn settings(config: &BuildsConfig, shared_store: bool) -> Result<Settings, StartError> {
    let mut settings = Settings::new(uuid::Uuid::new_v4().to_string());
    settings.resolve_deadline = config.resolve_timeout;
    settings.takeover = if shared_store { Takeover::WhenExpired } else { Takeover::AtOnce };
    let rules = &mut settings.rules;
    rules.per_host = config.concurrency;
    rules.per_tenant = config.tenant_concurrency;
    rules.queue = config.queue;
    rules.keep = config.keep;
    rules.budget_bytes = (config.images_budget.bytes() > 0).then_some(config.images_budget.bytes());
    rules.check().map_err(StartError::Config)?;
    Ok(settings)
}

fn limits(config: &BuildsConfig) -> Limits {
    let units = |quantity: &Quantity, nanos: i128| {
        u64::try_from(quantity.nanos() / nanos).ok().filter(|units| *units > 0)
    };
    Limits {
        cpu_millis: units(&config.cpu, 1_000_000),
        memory_bytes: units(&config.memory, 1_000_000_000),
        ..Limits::default()
    }
}

/// The platform that is asked for, in one spelling; what builds run, runs on this machine, so there is one.
///
/// # Errors
/// What is wrong with it, fit for the user.
pub(crate) fn check_platform(asked: Option<&str>) -> Result<Option<String>, String> {
    let Some(asked) = asked else { return Ok(None) };
    let (here, asked) = (platform(), asked.trim().to_ascii_lowercase());
    if asked == here {
        return Ok(Some(asked));
    }
    let shown: String = asked.chars().take(64).collect();
    Err(format!("platform: images of repositories are built for {here} on this server, not for {shown:?}"))
}

/// Of this machine, in the words of images.
fn platform() -> String {
    let arch = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    format!("linux/{arch}")
}

/// In the background: it walks every mirror.
fn evict_mirrors(git: &sandglass_repository::git::Git, budget: u64) {
    if budget == 0 {
        return;
    }
    let git = git.clone();
    tokio::task::spawn_blocking(move || {
        if let Err(error) = git.evict_mirrors(budget) {
            warn!(%error, "local copies of repositories could not be looked through");
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_are_built_for_this_machine_alone() {
        let here = platform();
        assert_eq!(check_platform(None), Ok(None));
        assert_eq!(check_platform(Some(&format!(" {} ", here.to_uppercase()))), Ok(Some(here.clone())));
        for other in ["", "linux", "windows/amd64", "linux/sparc", "linux/amd64/v9", &"x".repeat(5000)] {
            let refused = check_platform(Some(other)).unwrap_err();
            assert!(refused.contains(&here) && refused.len() < 200, "{refused}");
        }
    }
}
