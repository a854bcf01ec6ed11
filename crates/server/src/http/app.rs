//! What handlers share.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};

use axum::extract::FromRequestParts;
use http::request::Parts;
use sandglass_api::lifecycle::Sandbox;
use sandglass_proxy::{Forwarder, Limits};
use sandglass_sandbox::{
    agent,
    lifecycle::state::State,
    ports::{
        RuntimeErrorKind,
        runtime::{Exposure, RuntimeError},
    },
    spec::Spec,
};

use super::{
    engine_errors,
    error::{ApiError, ApiResult, Code},
    images::Images,
    present,
    validate::create::CreateRules,
};
use crate::{
    agents::{Agents, Readiness},
    builds::Builds,
    config::{Config, EndpointStyle, RuntimeKind},
    engine::{Engine, commit::EngineError, extend, index::Entry},
    gateway::{self, Gateway, GatewaySettings, InProcess},
    ingress::{
        AGENT_PORT, AccessRules, Carrier, IngressSettings, IngressState, Lookup, Mapped, Minting, NotWoken,
        Reach, Target, Waking,
        public_host::{self, Whereabouts},
        skips_renewal,
    },
    renewal::Renewals,
    runtimes,
    telemetry::Telemetry,
    tenants::{Keyring, Principal},
    webhooks::Webhooks,
    workspace::Workspaces,
};

/// How long a runtime may take to say whether it would take a sandbox.
const ADMISSION: Duration = Duration::from_secs(15);

/// Cheap to clone; everything in it is shared.
#[derive(Clone)]
pub struct App {
    pub config: Arc<Config>,
    pub keys: Keyring,
    pub engine: Arc<Engine>,
    /// Only the embedded runtime keeps images of its own.
    pub images: Option<Images>,
    pub ingress: IngressState,
    pub rules: Arc<CreateRules>,
    /// How this machine is named to clients that come without the server.
    whereabouts: Arc<Whereabouts>,
    /// For machines without a default route.
    named_address: IpAddr,
    inward: Inward,
    pub telemetry: Telemetry,
    /// What is known of the agents in the boxes.
    agents: Arc<Agents>,
    renewals: Arc<OnceLock<Renewals>>,
    /// How routes through a gateway are written, where clients come through one.
    pub minting: Option<Arc<Minting>>,
    /// What leads to sandboxes for the gateway within this server.
    gateway: Option<(Arc<dyn Lookup>, Carrier)>,
    /// Absent where images cannot be built.
    pub builds: Option<Builds>,
    /// Absent where events are sent to nobody.
    pub webhooks: Option<Webhooks>,
    /// What makes sandboxes from repositories, where the server does.
    workspaces: Option<Arc<Workspaces>>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl FromRequestParts<App> for Images {
    type Rejection = ApiError;

    async fn from_request_parts(_: &mut Parts, app: &App) -> Result<Self, ApiError> {
        app.images.clone().ok_or_else(|| {
            let name = app.engine.runtime().name();
            let message = format!("images of the {name} runtime are managed with its own tools, not here");
            ApiError::new(Code::NotAvailable, message)
        })
    }
}

fn whereabouts(config: &Config) -> Whereabouts {
    Whereabouts {
        eip: config.server.eip.clone(),
        listens_on: config.server.host.clone(),
        in_container: public_host::in_container(),
        host_ip: config.docker.host_ip.clone(),
        engine_host: runtimes::engine_host(config),
        publishes_on: Some(config.docker.publish_host),
    }
}

/// The machine whose ports lead into sandboxes, as the server itself reaches it. Blocking where its name has to be resolved.
pub(crate) fn published_host(config: &Config) -> IpAddr {
    match config.runtime.kind {
        RuntimeKind::Docker => public_host::resolve(&whereabouts(config).local()),
        RuntimeKind::Embedded | RuntimeKind::Kubernetes => IpAddr::V4(Ipv4Addr::LOCALHOST),
    }
}

impl App {
    /// Puts the HTTP side together over an engine. Blocking where names have to be resolved.
    pub fn new(
        config: Arc<Config>,
        engine: Arc<Engine>,
        images: impl Into<Option<Images>>,
        keys: Keyring,
    ) -> Self {
        let access = AccessRules { keys: keys.clone(), open_proxy: config.server.open_proxy };
        let settings = IngressSettings { access, eip: config.server.eip.clone() };
        let docker = config.runtime.kind == RuntimeKind::Docker;
        let whereabouts = whereabouts(&config);
        let loopback = IpAddr::V4(Ipv4Addr::LOCALHOST);
        let inward = Inward {
            resolve_internal: config.proxy.resolve_internal,
            host: published_host(&config),
            open: config.ingress.open_gateway,
        };
        let renewals = Arc::<OnceLock<Renewals>>::default();
        let lookup = IndexLookup { engine: Arc::downgrade(&engine), inward, renewals: renewals.clone() };
        let lookup: Arc<dyn Lookup> = Arc::new(lookup);
        let gateway = config.ingress.listen.as_ref().map(|_| (lookup.clone(), gateway::carrier()));
        let ingress = IngressState::new(lookup, Forwarder::new(Limits::default()), settings);
        let (cut, also) = (ingress.clone(), gateway.as_ref().map(|(_, carrier)| carrier.clone()));
        engine.on_removed(move |observed| {
            // The host's own addresses are shared by all that have none.
            if let Some(address) = observed.address.filter(|address| !address.is_loopback()) {
                cut.forget(address);
                also.iter().for_each(|carrier| carrier.forget(address));
            }
        });
        let minting = Minting::of(&config.ingress).map(Arc::new);
        let mut rules = CreateRules::of(&config, engine.runtime().name(), engine.runtime().capabilities());
        rules.host_files_are_here = whereabouts.engine_host.is_none();
        Self {
            config,
            keys,
            engine,
            images: images.into(),
            ingress,
            rules: Arc::new(rules),
            whereabouts: Arc::new(whereabouts),
            named_address: if docker { public_host::named_address() } else { loopback },
            inward,
            telemetry: Telemetry::default(),
            agents: Arc::default(),
            renewals,
            minting,
            gateway,
            builds: None,
            webhooks: None,
            workspaces: None,
        }
    }

    /// How endpoint answers are written.
    pub(super) fn endpoint_style(&self) -> EndpointStyle {
        match self.config.runtime.kind {
            RuntimeKind::Embedded => self.config.embedded.endpoints,
            RuntimeKind::Docker | RuntimeKind::Kubernetes => EndpointStyle::Direct,
        }
    }

    /// The name of this machine for clients that come without the server.
    pub(super) fn public_host(&self) -> String {
        // Embedded sandboxes have no ports of this machine.
        if self.config.runtime.kind == RuntimeKind::Embedded {
            return String::new();
        }
        self.whereabouts.public(|| public_host::routed_address().unwrap_or(self.named_address))
    }

    /// The gateway within this server, if there is to be one, and what to drain at its end.
    pub fn gateway(&self) -> Option<(Gateway, Carrier)> {
        let (lookup, carrier) = self.gateway.clone()?;
        let directory = InProcess { lookup, engine: Arc::downgrade(&self.engine) };
        let settings = GatewaySettings::of(&self.config.ingress);
        Some((Gateway::new(Arc::new(directory), carrier.clone(), settings), carrier))
    }

    /// Where a sandbox is and what opens it.
    pub(super) fn target(&self, entry: &Entry) -> Option<Target> {
        target(entry, self.inward)
    }

    /// The agent of a box that runs, and whether it has started the box's program.
    pub(super) async fn agent(&self, entry: &Entry) -> Option<(agent::Agent, Readiness)> {
        let target = self.target(entry)?;
        let Reach::Addressable(address) = target.reach else { return None };
        let port = target.mapped.map_or(AGENT_PORT, |mapped| mapped.agent);
        let at = SocketAddr::new(address, port);
        let known = self.agents.of(entry.id, at).await;
        Some((known, Agents::readiness(known, at).await))
    }

    /// Whether the runtime would take this sandbox, asked before anything is accepted.
    pub(super) async fn admit(&self, spec: &Spec) -> ApiResult<()> {
        let away = |why: &str| RuntimeError::new(RuntimeErrorKind::Unavailable, "engine", why);
        let admitted = match self.engine.reachable() {
            Err(lost) => Err(away(&lost.message)),
            Ok(()) => tokio::time::timeout(ADMISSION, self.engine.runtime().admit(spec))
                .await
                .unwrap_or_else(|_| Err(away("the runtime does not answer"))),
        };
        admitted.map_err(|refused| engine_errors::of_admission(&refused))
    }

    /// An image that a build of another tenant made does not exist for this caller.
    pub(super) async fn owns_image(&self, principal: &Principal, image: &str) -> ApiResult<()> {
        let Some(builds) = self.builds.as_ref().filter(|_| principal.tenant().is_some()) else {
            return Ok(());
        };
        let foreign = builds.is_foreign(image, principal.namespace()).await;
        match foreign.map_err(|_| ApiError::internal())? {
            true => Err(ApiError::new(Code::ImageNotFound, format!("there is no image {image}"))),
            false => Ok(()),
        }
    }

    /// Whether reads can be answered: what the index holds may be old while the runtime is away.
    pub(super) fn readable(&self) -> ApiResult<()> {
        self.engine.reachable().map_err(|lost| ApiError::new(Code::QueryUnavailable, lost.message.clone()))
    }

    /// Makes sandboxes from repositories.
    #[must_use]
    pub fn with_workspaces(self, workspaces: Arc<Workspaces>) -> Self {
        Self { workspaces: Some(workspaces), ..self }
    }

    pub(super) fn workspaces(&self) -> Option<&Workspaces> {
        self.workspaces.as_deref()
    }

    /// A sandbox as lists show it.
    pub(super) fn show(&self, entry: &Entry) -> Sandbox {
        let now = self.engine.clock().now();
        let mut sandbox = present::sandbox(entry);
        sandbox.policies = present::policies(entry, self.engine.use_of(entry));
        present::complete(sandbox, entry, self.workspaces(), now)
    }

    /// A sandbox as it is read: with the words of the short dialect.
    pub(super) fn show_in_short(&self, entry: &Entry) -> Sandbox {
        present::in_short(self.show(entry), entry, self.engine.clock().now())
    }

    /// Counts and traces there, instead of nowhere.
    #[must_use]
    pub fn with_telemetry(self, telemetry: Telemetry) -> Self {
        Self { telemetry, ..self }
    }

    /// Images are built there.
    #[must_use]
    pub fn with_builds(self, builds: Option<Builds>) -> Self {
        Self { builds, ..self }
    }

    /// Events are sent from there.
    #[must_use]
    pub fn with_webhooks(self, webhooks: Option<Webhooks>) -> Self {
        Self { webhooks, ..self }
    }

    /// Use of a sandbox extends its life from now on. The first call counts.
    pub fn renew_on_access(&self, renewals: Renewals) {
        let _ = self.renewals.set(renewals);
    }

    /// A request that was admitted used this sandbox otherwise than through the proxy.
    pub(super) fn used(&self, headers: &http::HeaderMap, id: &str) {
        if let Ok(id) = id.parse()
            && !skips_renewal(headers)
        {
            self.engine.used(id);
        }
        if let Some(renewals) = self.renewals.get()
            && !skips_renewal(headers)
        {
            renewals.used(id);
        }
    }

    /// The sandbox, if there is one for this caller: another tenant's looks as if it did not exist.
    pub(super) fn find(&self, principal: &Principal, id: &str) -> ApiResult<Entry> {
        match self.engine.find(id) {
            Ok(entry) if principal.may_see(entry.tenant()) => Ok(entry),
            // Nobody knows what there is while the runtime is away; what is known is still acted on.
            Ok(_) | Err(EngineError::NotFound(_)) => {
                Err(self.readable().err().unwrap_or_else(ApiError::sandbox_not_found))
            }
            Err(error) => Err(error.into()),
        }
    }
}

/// Answers the ingress from the index.
/// Weak: the engine tells the ingress of removals, so a strong reference here would keep both alive for ever.
struct IndexLookup {
    engine: Weak<Engine>,
    inward: Inward,
    renewals: Arc<OnceLock<Renewals>>,
}

impl Lookup for IndexLookup {
    fn target(&self, id: &str) -> Option<Target> {
        target(&self.engine.upgrade()?.find(id).ok()?, self.inward)
    }

    fn complete(&self) -> bool {
        self.engine.upgrade().is_some_and(|engine| engine.reachable().is_ok())
    }

    fn used(&self, id: &str) {
        if let (Some(engine), Ok(id)) = (self.engine.upgrade(), id.parse()) {
            engine.used(id);
        }
        if let Some(renewals) = self.renewals.get() {
            renewals.used(id);
        }
    }

    fn lasts(&self, id: &str) {
        if let (Some(engine), Ok(id)) = (self.engine.upgrade(), id.parse()) {
            engine.present(id);
        }
        if let Some(renewals) = self.renewals.get() {
            renewals.used(id);
        }
    }

    fn wake(&self, id: &str) -> Waking {
        let (engine, id) = (self.engine.clone(), id.to_owned());
        Box::pin(async move {
            let engine = engine.upgrade().ok_or(NotWoken::Later)?;
            match engine.wake(&id).await {
                Ok(()) => Ok(()),
                Err(EngineError::NotFound(_)) => Err(NotWoken::Gone),
                Err(EngineError::OperationFailed { .. }) => Err(NotWoken::Failed),
                Err(_) => Err(NotWoken::Later),
            }
        })
    }
}

/// How the server itself gets into sandboxes.
#[derive(Clone, Copy, Debug)]
struct Inward {
    /// `proxy.resolve_internal`: to a sandbox's own address where it has one.
    resolve_internal: bool,
    /// The machine whose ports lead into sandboxes.
    host: IpAddr,
    /// `ingress.open_gateway`.
    open: bool,
}

impl Inward {
    fn way(self, own: Option<IpAddr>, exposure: Exposure) -> (Option<IpAddr>, Option<Mapped>) {
        match exposure {
            Exposure::Published { agent, http, egress } if own.is_none() || !self.resolve_internal => {
                (Some(self.host), Some(Mapped { agent, http, egress }))
            }
            Exposure::Host => (own.or(Some(self.host)), None),
            Exposure::Published { .. } | Exposure::Address | Exposure::None => (own, None),
        }
    }
}

fn target(entry: &Entry, inward: Inward) -> Option<Target> {
    let (agent_token, route_token) = entry.tokens()?;
    let observed = entry.observed.as_deref();
    let exposure = observed.map_or(Exposure::None, |o| o.exposure);
    let (address, mapped) = inward.way(observed.and_then(|o| o.address), exposure);
    let wakes = entry.wakes();
    let secure_access = entry.spec().is_some_and(|s| s.secure_access);
    // What only the server may use is published on this machine alone.
    let address = if secure_access && mapped.is_some() { Some(Ipv4Addr::LOCALHOST.into()) } else { address };
    let reach = match (entry.status()?.state, address) {
        (State::Pending, address) => Reach::Starting(address),
        (State::Paused, Some(address)) => Reach::Paused(address),
        // A request that is able to wait does so, instead of being frozen with the box.
        (State::Pausing | State::Resuming, Some(address)) if wakes => Reach::Paused(address),
        (state, Some(address)) if state.addressable() => Reach::Addressable(address),
        (state, None) if state == State::Paused || state.addressable() => Reach::Nowhere,
        _ => Reach::Gone,
    };
    Some(Target {
        reach,
        exposure,
        mapped,
        agent_token: agent_token.to_owned(),
        route_token: route_token.to_owned(),
        egress_token: observed.and_then(|o| o.egress_token.clone()),
        secure_access,
        open: inward.open,
        wakes,
        renews: extend::extension(entry).is_some() || entry.policies().is_some_and(|p| p.idle.is_some()),
        tenant: entry.tenant().map(str::to_owned),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ways_in() {
        let host = IpAddr::from([127, 0, 0, 1]);
        let own = Some(IpAddr::from([172, 17, 0, 2]));
        let published = Exposure::Published { agent: 1, http: 2, egress: Some(3) };
        let ports = Some(Mapped { agent: 1, http: 2, egress: Some(3) });
        for (resolve_internal, own, exposure, expected) in [
            (true, own, published, (own, None)),
            (false, own, published, (Some(host), ports)),
            (true, None, published, (Some(host), ports)),
            (true, None, Exposure::Host, (Some(host), None)),
            (false, own, Exposure::Host, (own, None)),
            (false, own, Exposure::Address, (own, None)),
            (true, None, Exposure::None, (None, None)),
        ] {
            let seen = Inward { resolve_internal, host, open: false }.way(own, exposure);
            assert_eq!(seen, expected, "{resolve_internal} {own:?} {exposure:?}");
        }
    }
}
