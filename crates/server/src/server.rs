//! Puts the parts together: the only place that knows all of them.
//!
//! A server is started from a configuration value and a bound listener, and ended by its handle; that alone lets tests run many beside each other.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use sandglass_sandbox::{
    Clock, SystemClock,
    ports::Store,
    workspace::{AUTHORITIES_FILE, Git},
};
use tokio::{task::JoinHandle, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    builds::{self, Builds},
    config::{Config, ProcessEnvironment, StoreKind},
    engine::{Engine, RecoverError},
    gateway::{Door, GatewayLimits},
    http::{self, App, malformed, published_host, router},
    ingress::IngressState,
    listener::{self, CertificateError, Certificates, Limits, Looked, Serving, Transport},
    renewal::{AddressError, Renewals},
    runtimes::{self, Opened},
    store::SqlStore,
    telemetry::{
        CountedStore, Telemetry,
        metrics::Metrics,
        otlp::{self, Exporter},
    },
    tenants,
    webhooks::Webhooks,
    workspace::{self, FromBuilds, Images, Workspaces},
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
    #[error("cannot serve TLS: {0}")]
    Certificate(#[from] CertificateError),
}

/// Everything that is opened before the asynchronous runtime exists.
#[derive(Debug)]
pub struct Prepared {
    config: Arc<Config>,
    listener: TcpListener,
    /// Where this server is the gateway too.
    gateway: Option<TcpListener>,
    /// Answers plain HTTP with the address under HTTPS.
    redirect: Option<TcpListener>,
    certificates: Option<Arc<Certificates>>,
    runtime: Opened,
}

impl Prepared {
    /// Binds the configured address and takes the state directory into use. Blocking.
    ///
    /// # Errors
    /// When the address is taken, the runtime is one that this version lacks, or the machine or state directory is not fit.
    pub fn open(config: Config) -> Result<Self, StartError> {
        let listener = bind(&config, config.server.port)?;
        let redirect = config.server.tls_redirect_port.map(|port| bind(&config, port)).transpose()?;
        Ok(Self { redirect, ..Self::open_on(config, listener)? })
    }

    /// The same on a listener that is bound already, and without a second one for redirects.
    ///
    /// # Errors
    /// As [`Prepared::open`].
    pub fn open_on(config: Config, listener: TcpListener) -> Result<Self, StartError> {
        let gateway = config.ingress.listen.clone().map(|address| {
            TcpListener::bind(&address).map_err(|source| StartError::Listen { address, source })
        });
        let gateway = gateway.transpose()?;
        let certificates = certificates(&config)?;
        let runtime = runtimes::open(&config)?;
        Ok(Self { config: Arc::new(config), listener, redirect: None, certificates, gateway, runtime })
    }

    /// Recovers what exists and serves.
    ///
    /// # Errors
    /// When the store or the runtime cannot be read.
    pub async fn start(self) -> Result<Server, StartError> {
        let Self { config, listener, redirect, certificates, gateway, runtime } = self;
        let store = SqlStore::open(&config.store)
            .await
            .map_err(|source| StartError::Store { place: SqlStore::place(&config.store), source })?;
        runtime.check().await?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let settings = runtime.settings(&config);
        let metrics = Arc::<Metrics>::default();
        let counted: Arc<dyn Store> = Arc::new(CountedStore::new(Arc::new(store.clone()), metrics.clone()));
        let engine = Engine::new(runtime.runtime.clone(), counted.clone(), clock.clone(), settings);
        let outcomes = metrics.clone();
        engine.on_created(move |failed_phase| outcomes.count_create(failed_phase));
        let timings = metrics.clone();
        engine.on_timed(move |timing| timings.stages.record(timing));
        let host = host_of_ports(&config).await;
        match builds::inside::over_http() {
            Ok(inside) => engine.speak_through(inside, host),
            Err(error) => warn!(%error, "hooks before the end of sandboxes cannot be run"),
        }
        let builds = open_builds(&config, host, &runtime, &store, clock.clone()).await;
        let images = builds.clone().map(|builds| Arc::new(FromBuilds(builds)) as Arc<dyn Images>);
        let workspaces = open_workspaces(&config, &engine, (counted, clock), images).await?;
        let (of, at) = (workspaces.clone(), engine.clock().clone());
        engine.describe_with(move |entry| http::describe(entry, of.as_deref(), at.now()));
        engine.recover().await?;
        if let Some(workspaces) = &workspaces {
            workspaces.settle().await;
        }
        let address =
            listener.local_addr().map_err(|source| StartError::Listen { address: "?".into(), source })?;
        let stop = CancellationToken::new();
        let keys = tenants::open(&config).await?;
        let exporter = exporter(&config, &engine, &metrics);
        let telemetry = Telemetry { metrics: metrics.clone(), tracer: exporter.tracer().clone() };
        let mut app =
            App::new(config.clone(), engine.clone(), runtime.images.clone(), keys).with_telemetry(telemetry);
        let webhooks = open_webhooks(&config, &store, &engine, engine.clock().clone());
        app = app.with_builds(builds.clone()).with_webhooks(webhooks.clone());
        if let Some(workspaces) = &workspaces {
            app = app.with_workspaces(workspaces.clone());
        }
        let renewals = Renewals::start(&engine, &config.renew_intent, metrics.clone())?;
        if let Some(renewals) = &renewals {
            app.renew_on_access(renewals.clone());
        }
        let gateway = gateway
            .map(|listener| open_gateway(listener, &app, (certificates.clone(), &stop)))
            .transpose()?
            .flatten();
        let doors = Doors { listener, redirect, certificates };
        let ingress = app.ingress.clone();
        let serving = doors
            .open(&config, app, &stop)
            .map_err(|source| StartError::Listen { address: address.to_string(), source })?;
        info!(%address, sandboxes = engine.index().len(), "listening");
        let drain = config.server.graceful_shutdown;
        Ok(Server {
            address,
            engine,
            workspaces,
            store,
            runtime,
            builds,
            webhooks,
            ingress,
            serving,
            gateway,
            stop,
            renewals,
            exporter,
            drain,
        })
    }
}

/// As agents are told them: none for any.
fn hosts(allowed: &[String]) -> Vec<String> {
    if allowed.iter().any(|host| host == "*") { Vec::new() } else { allowed.to_vec() }
}

/// What makes sandboxes from repositories, where images are found for them. Before the engine recovers.
async fn open_workspaces(
    config: &Config,
    engine: &Arc<Engine>,
    (store, clock): (Arc<dyn Store>, Arc<dyn Clock>),
    images: Option<Arc<dyn Images>>,
) -> Result<Option<Arc<Workspaces>>, StartError> {
    let Some(images) = images else { return Ok(None) };
    let wanted = &config.workspaces;
    let settings = workspace::Settings {
        attach_within: wanted.attach_timeout,
        grace: wanted.grace,
        shutdown_grace: wanted.shutdown_grace,
        agent_url: wanted.agent_url.clone(),
        secrets_dir: wanted.secrets_dir.clone(),
        git_authorities: config.builds.git_authorities.clone(),
        git: Git {
            hosts: hosts(&config.builds.allowed_hosts),
            allow_file: config.builds.file_urls,
            allow_http: config.builds.http_urls,
            repository_bytes: config.builds.repository_limit.bytes(),
            authorities: config.builds.git_authorities.as_ref().map(|_| AUTHORITIES_FILE.into()),
            ..Git::default()
        },
        ..workspace::Settings::new(runtimes::state_dir(config))
    };
    let opened = Workspaces::open(settings, store, clock, images).await;
    let workspaces =
        opened.map_err(|source| StartError::Store { place: SqlStore::place(&config.store), source })?;
    workspaces.serve(engine);
    engine.provision_with(workspaces.clone());
    if let Some(address) = &wanted.agent_listen {
        let refused = |source| StartError::Listen { address: address.clone(), source };
        let listener = TcpListener::bind(address).map_err(refused)?;
        workspaces.listen(listener).map_err(refused)?;
    }
    Ok(Some(workspaces))
}

/// Connections to the port that only redirects.
const REDIRECTED: usize = 256;

fn open_gateway(
    listener: TcpListener,
    app: &App,
    (certificates, stop): (Option<Arc<Certificates>>, &CancellationToken),
) -> Result<Option<Door>, StartError> {
    let Some((gateway, carrier)) = app.gateway() else { return Ok(None) };
    let server = &app.config.server;
    let limits =
        GatewayLimits { connections: 0, drain: server.graceful_shutdown, ..GatewayLimits::default() };
    let door = Door::open(listener, (gateway, carrier), (certificates, limits), stop.clone());
    let door = door.map_err(|source| StartError::Listen { address: "ingress.listen".into(), source })?;
    info!(address = %door.address(), "listening as the gateway");
    Ok(Some(door))
}

/// Whose ports lead into sandboxes without an address of their own.
async fn host_of_ports(config: &Config) -> IpAddr {
    let config = config.clone();
    let host = tokio::task::spawn_blocking(move || published_host(&config));
    host.await.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// The image builds. A server whose builds cannot work serves everything else.
async fn open_builds(
    config: &Config,
    host: IpAddr,
    runtime: &Opened,
    store: &SqlStore,
    clock: Arc<dyn Clock>,
) -> Option<Builds> {
    let parts = builds::Parts {
        host,
        store: Arc::new(store.clone()),
        runtime: runtime.runtime.clone(),
        captures: runtime.captures.clone(),
        dockerfiles: runtime.dockerfiles.clone(),
        inside: None,
        clock,
        config: config.builds.clone(),
        folder: runtimes::builds_folder(config),
        shared_store: config.store.kind == StoreKind::Postgresql,
        secrets_dir: config.workspaces.secrets_dir.clone(),
    };
    Builds::start(parts)
        .await
        .inspect_err(|error| warn!(%error, "images are not built here until the server is started again"))
        .ok()
}

/// What sends events to receivers. A server that cannot serves everything else.
fn open_webhooks(
    config: &Config,
    store: &SqlStore,
    engine: &Arc<Engine>,
    clock: Arc<dyn Clock>,
) -> Option<Webhooks> {
    Webhooks::start(config, store, engine, clock)
        .inspect_err(|error| warn!(%error, "events are sent to nobody until the server is started again"))
        .ok()
}

/// Where requests come in.
struct Doors {
    listener: TcpListener,
    redirect: Option<TcpListener>,
    certificates: Option<Arc<Certificates>>,
}

impl Doors {
    fn open(
        self,
        config: &Config,
        app: App,
        stop: &CancellationToken,
    ) -> std::io::Result<Vec<JoinHandle<()>>> {
        let limits = Limits {
            keep_alive: config.server.keep_alive,
            drain: config.server.graceful_shutdown,
            ..Limits::default()
        };
        let mut tasks = Vec::new();
        let metrics = app.telemetry.metrics.clone();
        let mut front = router::build(app);
        let transport = match self.certificates {
            None => Transport::Plain,
            Some(certificates) => {
                metrics.certificate_looked(Looked::Replaced);
                let tell = move |looked| metrics.certificate_looked(looked);
                tasks.push(tokio::spawn(certificates.clone().watch(stop.clone(), tell)));
                front = front.strictly_over_tls(config.server.hsts_max_age);
                Transport::Tls(certificates)
            }
        };
        if let Some(redirect) = self.redirect {
            let answers = Arc::new(listener::redirects(config.server.port));
            let few = Limits { connections: limits.connections.min(REDIRECTED), ..limits };
            let serving =
                Serving { answers, refuse: malformed::answer, transport: Transport::Plain, limits: few };
            tasks.push(listener::spawn(redirect, serving, stop.clone())?);
        }
        let answers = Arc::new(front);
        let serving = Serving { answers, refuse: malformed::answer, transport, limits };
        tasks.push(listener::spawn(self.listener, serving, stop.clone())?);
        Ok(tasks)
    }
}

/// The certificate that the configuration names, if it names one. Blocking.
///
/// # Errors
/// When it cannot be used.
pub fn certificates(config: &Config) -> Result<Option<Arc<Certificates>>, CertificateError> {
    let (Some(cert), Some(key)) = (&config.server.tls_cert, &config.server.tls_key) else { return Ok(None) };
    let certificates = Certificates::open(cert, key)?;
    if Certificates::exposed(key) {
        warn!(key = %key.display(), "others than its owner can read or change the private key");
    }
    Ok(Some(certificates))
}

fn bind(config: &Config, port: u16) -> Result<TcpListener, StartError> {
    let address = format!("{}:{port}", bracketed(&config.server.host));
    let bound = TcpListener::bind(&address).and_then(|listener| {
        // The standard library asks for a short queue.
        rustix::net::listen(&listener, i32::try_from(config.server.backlog).unwrap_or(i32::MAX))?;
        Ok(listener)
    });
    bound.map_err(|source| StartError::Listen { address, source })
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
    workspaces: Option<Arc<Workspaces>>,
    store: SqlStore,
    runtime: Opened,
    builds: Option<Builds>,
    webhooks: Option<Webhooks>,
    ingress: IngressState,
    serving: Vec<JoinHandle<()>>,
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
        self.gateway.as_ref().map(Door::address)
    }

    /// The image builds, if they work here.
    pub fn builds(&self) -> Option<&Builds> {
        self.builds.as_ref()
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
        let serving = async {
            for door in self.serving {
                let _ = door.await;
            }
        };
        let gateway = async {
            if let Some(gateway) = self.gateway {
                gateway.close(self.drain).await;
            }
        };
        let ((), cut, ()) = tokio::join!(serving, self.ingress.drain(self.drain), gateway);
        if cut.upgrades > 0 {
            info!(upgrades = cut.upgrades, "upgraded connections that were still open were cut");
        }
        if let Some(renewals) = &self.renewals {
            renewals.stop().await;
        }
        self.exporter.stop(self.drain.saturating_sub(begun.elapsed()).max(LAST_EXPORT)).await;
        if let Some(builds) = &self.builds {
            builds.shut().await;
        }
        self.engine.stop().await;
        if let Some(webhooks) = &self.webhooks {
            webhooks.couriers.stop().await;
        }
        if let Some(workspaces) = &self.workspaces {
            workspaces.stop().await;
        }
        self.store.shut().await;
        // Without boxes the host-side network is of no use; with boxes it must stay.
        if self.engine.index().is_empty() {
            self.runtime.leave();
        }
    }
}
