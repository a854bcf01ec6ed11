//! Puts the parts together: the only place that knows all of them.
//!
//! A server is started from a configuration value and a bound listener, and ended by its handle; that alone lets tests run many beside each other.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
};

use sandglass_runtimes::embedded::{EmbeddedConfig, EmbeddedRuntime, Subnet};
use sandglass_sandbox::{
    Clock, SystemClock,
    ports::{Store, runtime::RuntimeError},
};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    accept,
    config::{Config, RuntimeKind, SubnetChoice},
    engine::{Engine, RecoverError, Settings},
    http::{App, images::Images, router},
    store::SqlStore,
    tenants,
};

/// Why a server could not start. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error("runtime.type = \"{0}\" is not available in this version; use \"embedded\"")]
    UnsupportedRuntime(&'static str),
    #[error("the embedded runtime cannot start, failed in phase {}: {}", .0.phase, .0.message)]
    Runtime(RuntimeError),
    #[error("cannot open the store {place}: {source}")]
    Store { place: String, source: sandglass_sandbox::ports::StoreError },
    #[error(transparent)]
    Tenants(#[from] tenants::OpenError),
    #[error("cannot recover: {0}")]
    Recover(#[from] RecoverError),
}

/// Everything that is opened before the asynchronous runtime exists.
#[derive(Debug)]
pub struct Prepared {
    config: Arc<Config>,
    listener: TcpListener,
    runtime: EmbeddedRuntime,
}

impl Prepared {
    /// Binds the configured address and takes the state directory into use. Blocking.
    ///
    /// # Errors
    /// When the address is taken, the runtime is one that this version lacks, or the machine or state directory is not fit.
    pub fn open(config: Config) -> Result<Self, StartError> {
        let address = format!("{}:{}", bracketed(&config.server.host), config.server.port);
        let listener =
            TcpListener::bind(&address).map_err(|source| StartError::Listen { address, source })?;
        Self::open_on(config, listener)
    }

    /// The same on a listener that is bound already.
    ///
    /// # Errors
    /// As [`Prepared::open`].
    pub fn open_on(config: Config, listener: TcpListener) -> Result<Self, StartError> {
        match config.runtime.kind {
            RuntimeKind::Embedded => {}
            RuntimeKind::Docker => return Err(StartError::UnsupportedRuntime("docker")),
            RuntimeKind::Kubernetes => return Err(StartError::UnsupportedRuntime("kubernetes")),
        }
        let embedded = &config.embedded;
        let runtime = EmbeddedRuntime::open(EmbeddedConfig {
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
        })
        .map_err(StartError::Runtime)?;
        Ok(Self { config: Arc::new(config), listener, runtime })
    }

    /// Recovers what exists and serves.
    ///
    /// # Errors
    /// When the store or the runtime cannot be read.
    pub async fn start(self) -> Result<Server, StartError> {
        let Self { config, listener, runtime } = self;
        let store = SqlStore::open(&config.store)
            .await
            .map_err(|source| StartError::Store { place: SqlStore::place(&config.store), source })?;
        let images = images(&runtime, &config.embedded.state_dir);
        let runtime = Arc::new(runtime);
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let settings = Settings {
            create_grace: config.embedded.create_grace,
            max_sandboxes: config.embedded.max_sandboxes.unwrap_or(0),
            ..Settings::default()
        };
        let engine = Engine::new(runtime.clone(), Arc::new(store.clone()), clock, settings);
        engine.recover().await?;
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: "?".into(), source })?;
        let stop = CancellationToken::new();
        let keys = tenants::open(&config).await?;
        let app = App::new(config.clone(), engine.clone(), images, keys);
        let limits = accept::Limits {
            keep_alive: config.server.keep_alive,
            drain: config.server.graceful_shutdown,
            connections: accept::connection_limit(),
        };
        let serving = accept::spawn(listener, router::build(app), stop.clone(), limits)
            .map_err(|source| StartError::Listen { address: address.to_string(), source })?;
        info!(%address, sandboxes = engine.index().len(), "listening");
        Ok(Server { address, engine, store, runtime, serving, stop })
    }
}

fn images(runtime: &EmbeddedRuntime, state_dir: &std::path::Path) -> Images {
    let uploads = state_dir.join("uploads");
    // What a killed server left half uploaded is of no use.
    let _ = std::fs::remove_dir_all(&uploads);
    if let Err(error) = std::fs::create_dir_all(&uploads) {
        warn!(%error, "there is no room for image uploads");
    }
    Images { store: runtime.images().clone(), uploads, in_use: Arc::new(runtime.image_users()) }
}

fn bracketed(host: &str) -> String {
    if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.to_owned() }
}

/// A running server.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
    engine: Arc<Engine>,
    store: SqlStore,
    runtime: Arc<EmbeddedRuntime>,
    serving: JoinHandle<()>,
    stop: CancellationToken,
}

impl Server {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The engine, for callers in the same process.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Stops accepting, lets requests finish for the configured time, and ends. Sandboxes stay as they are.
    pub async fn stop(self) {
        self.stop.cancel();
        let _ = self.serving.await;
        self.engine.stop().await;
        self.store.shut().await;
        // Without boxes the host-side network is of no use; with boxes it must stay.
        if self.engine.index().is_empty()
            && let Err(error) = self.runtime.remove_network()
        {
            warn!(%error, "the host-side network could not be removed");
        }
    }
}
