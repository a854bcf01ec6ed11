//! Puts the parts together: the only place that knows all of them.
//!
//! A server is started from a configuration value and a bound listener, and ended by its handle; that alone lets tests run many beside each other.

use std::{
    net::{SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use sandglass_sandbox::{Clock, SystemClock, ports::Store};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    accept,
    config::{Config, ProcessEnvironment},
    engine::{Engine, RecoverError},
    gateway::{self, GatewayLimits},
    http::{App, router},
    ingress::Carrier,
    renewal::{AddressError, Renewals},
    runtimes::{self, Opened},
    store::SqlStore,
    telemetry::{
        CountedStore, Telemetry,
        metrics::Metrics,
        otlp::{self, Exporter},
    },
    tenants,
};

/// Why a server could not start. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error(transparent)]
    Runtime(#[from] runtimes::OpenError),
    #[error("cannot open the store {place}: {source}")]
    Store { place: String, source: sandglass_sandbox::ports::StoreError },
    #[error(transparent)]
    Tenants(#[from] tenants::OpenError),
    #[error("cannot recover: {0}")]
    Recover(#[from] RecoverError),
    #[error("renew_intent.redis.dsn: {0}")]
    RenewIntent(#[from] AddressError),
}

/// Everything that is opened before the asynchronous runtime exists.
#[derive(Debug)]
pub struct Prepared {
    config: Arc<Config>,
    listener: TcpListener,
    /// Where this server is the gateway too.
    gateway: Option<TcpListener>,
    runtime: Opened,
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
        let gateway = config.ingress.listen.clone().map(|address| {
            TcpListener::bind(&address).map_err(|source| StartError::Listen { address, source })
        });
        let gateway = gateway.transpose()?;
        let runtime = runtimes::open(&config)?;
        Ok(Self { config: Arc::new(config), listener, gateway, runtime })
    }

    /// Recovers what exists and serves.
    ///
    /// # Errors
    /// When the store or the runtime cannot be read.
    pub async fn start(self) -> Result<Server, StartError> {
        let Self { config, listener, gateway, runtime } = self;
        let store = SqlStore::open(&config.store)
            .await
            .map_err(|source| StartError::Store { place: SqlStore::place(&config.store), source })?;
        runtime.check().await?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let settings = runtime.settings(&config);
        let metrics = Arc::<Metrics>::default();
        let counted = Arc::new(CountedStore::new(Arc::new(store.clone()), metrics.clone()));
        let engine = Engine::new(runtime.runtime.clone(), counted, clock, settings);
        let outcomes = metrics.clone();
        engine.on_created(move |failed_phase| outcomes.count_create(failed_phase));
        engine.recover().await?;
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: "?".into(), source })?;
        let stop = CancellationToken::new();
        let keys = tenants::open(&config).await?;
        let exporter = exporter(&config, &engine, &metrics);
        let telemetry = Telemetry { metrics: metrics.clone(), tracer: exporter.tracer().clone() };
        let app =
            App::new(config.clone(), engine.clone(), runtime.images.clone(), keys).with_telemetry(telemetry);
        let renewals = Renewals::start(&engine, &config.renew_intent, metrics)?;
        if let Some(renewals) = &renewals {
            app.renew_on_access(renewals.clone());
        }
        let gateway = gateway.map(|listener| Door::open(listener, &app, stop.clone())).transpose()?.flatten();
        let limits = accept::Limits {
            keep_alive: config.server.keep_alive,
            drain: config.server.graceful_shutdown,
            connections: accept::connection_limit(),
        };
        let serving = accept::spawn(listener, router::build(app), stop.clone(), limits)
            .map_err(|source| StartError::Listen { address: address.to_string(), source })?;
        info!(%address, sandboxes = engine.index().len(), "listening");
        let drain = config.server.graceful_shutdown;
        Ok(Server { address, engine, store, runtime, serving, gateway, stop, renewals, exporter, drain })
    }
}

/// The gateway within the server.
#[derive(Debug)]
struct Door {
    address: SocketAddr,
    serving: JoinHandle<()>,
    carrier: Carrier,
}

impl Door {
    fn open(listener: TcpListener, app: &App, stop: CancellationToken) -> Result<Option<Self>, StartError> {
        let Some((gateway, carrier)) = app.gateway() else { return Ok(None) };
        let failed = |source| StartError::Listen { address: "ingress.listen".into(), source };
        let address = listener.local_addr().map_err(failed)?;
        let limits = GatewayLimits {
            connections: 0,
            head: app.config.server.keep_alive,
            drain: app.config.server.graceful_shutdown,
        };
        let serving = gateway::start(listener, gateway, limits, stop).map_err(failed)?;
        info!(%address, "listening as the gateway");
        Ok(Some(Self { address, serving, carrier }))
    }
}

fn exporter(config: &Config, engine: &Arc<Engine>, metrics: &Arc<Metrics>) -> Exporter {
    let (settings, complaints) = otlp::Settings::read(&config.otel, &ProcessEnvironment);
    for complaint in complaints {
        warn!("{complaint}");
    }
    let (engine, source) = (Arc::downgrade(engine), metrics.clone());
    Exporter::start(settings, metrics, Box::new(move || source.families(engine.upgrade().as_deref())))
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
    runtime: Opened,
    serving: JoinHandle<()>,
    gateway: Option<Door>,
    stop: CancellationToken,
    renewals: Option<Renewals>,
    exporter: Exporter,
    drain: Duration,
}

/// What the last export gets even when the requests have used up all the time there is.
const LAST_EXPORT: Duration = Duration::from_secs(1);

impl Server {
    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens as the gateway, if it is one.
    pub fn gateway_address(&self) -> Option<SocketAddr> {
        self.gateway.as_ref().map(|gateway| gateway.address)
    }

    /// The engine, for callers in the same process.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Stops accepting, lets requests finish for the configured time, and ends. Sandboxes stay as they are.
    pub async fn stop(self) {
        let begun = Instant::now();
        self.stop.cancel();
        self.engine.close_streams();
        if let Some(Door { serving, carrier, .. }) = self.gateway {
            let _ = tokio::join!(self.serving, serving, carrier.drain(self.drain));
        } else {
            let _ = self.serving.await;
        }
        if let Some(renewals) = &self.renewals {
            renewals.stop().await;
        }
        self.exporter.stop(self.drain.saturating_sub(begun.elapsed()).max(LAST_EXPORT)).await;
        self.engine.stop().await;
        self.store.shut().await;
        // Without boxes the host-side network is of no use; with boxes it must stay.
        if self.engine.index().is_empty() {
            self.runtime.leave();
        }
    }
}
