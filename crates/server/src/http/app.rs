//! What handlers share.

use std::{
    path::PathBuf,
    sync::{Arc, Weak},
};

use axum::extract::FromRef;
use sandglass_proxy::{Forwarder, Limits};
use sandglass_sandbox::lifecycle::state::State;

use super::{images::Images, validate::create::CreateRules};
use crate::{
    config::Config,
    engine::{Engine, index::Entry},
    ingress::{AccessRules, IngressSettings, IngressState, Lookup, Reach, Target},
};

/// Cheap to clone; everything in it is shared.
#[derive(Clone)]
pub struct App {
    pub config: Arc<Config>,
    pub engine: Arc<Engine>,
    pub images: Images,
    pub ingress: IngressState,
    pub rules: Arc<CreateRules>,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("engine", &self.engine).finish_non_exhaustive()
    }
}

impl FromRef<App> for Images {
    fn from_ref(app: &App) -> Self {
        app.images.clone()
    }
}

impl App {
    /// Puts the HTTP side together over an engine.
    pub fn new(config: Arc<Config>, engine: Arc<Engine>, images: Images) -> Self {
        let access = AccessRules {
            api_key: config.server.api_key.as_ref().map(|key| key.expose().to_owned()),
            open_proxy: config.server.open_proxy,
        };
        let settings = IngressSettings { access, eip: config.server.eip.clone() };
        let lookup = Arc::new(IndexLookup(Arc::downgrade(&engine)));
        let ingress = IngressState::new(lookup, Forwarder::new(Limits::default()), settings);
        let cut = ingress.clone();
        engine.on_removed(move |observed| {
            if let Some(address) = observed.address {
                cut.forget(address.into());
            }
        });
        let rules = CreateRules {
            max_timeout: config.server.max_sandbox_timeout,
            allowed_host_paths: config.storage.allowed_host_paths.iter().map(PathBuf::from).collect(),
            arch: if cfg!(target_arch = "aarch64") { "arm64" } else { "amd64" },
        };
        Self { config, engine, images, ingress, rules: Arc::new(rules) }
    }
}

/// Answers the ingress from the index.
/// Weak: the engine tells the ingress of removals, so a strong reference here would keep both alive for ever.
struct IndexLookup(Weak<Engine>);

impl Lookup for IndexLookup {
    fn target(&self, id: &str) -> Option<Target> {
        target(&self.0.upgrade()?.find(id).ok()?)
    }
}

/// Where a sandbox is and what opens it.
pub(super) fn target(entry: &Entry) -> Option<Target> {
    let (agent_token, route_token) = entry.tokens()?;
    let address = entry.observed.as_deref().and_then(|o| o.address).map(Into::into);
    let reach = match (entry.status()?.state, address) {
        (State::Pending, address) => Reach::Starting(address),
        (State::Paused, Some(address)) => Reach::Paused(address),
        (state, Some(address)) if state.addressable() => Reach::Addressable(address),
        _ => Reach::Gone,
    };
    Some(Target {
        reach,
        agent_token: agent_token.to_owned(),
        route_token: route_token.to_owned(),
        secure_access: entry.spec().is_some_and(|s| s.secure_access),
    })
}
