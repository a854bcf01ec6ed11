//! What handlers share.

use std::{
    path::PathBuf,
    sync::{Arc, Weak},
};

use axum::extract::FromRef;
use sandglass_proxy::{Forwarder, Limits};
use sandglass_sandbox::lifecycle::state::State;

use super::{
    error::{ApiError, ApiResult},
    images::Images,
    validate::create::CreateRules,
};
use crate::{
    config::Config,
    engine::{Engine, index::Entry},
    ingress::{AccessRules, IngressSettings, IngressState, Lookup, Reach, Target},
    tenants::{Keyring, Principal},
};

/// Cheap to clone; everything in it is shared.
#[derive(Clone)]
pub struct App {
    pub config: Arc<Config>,
    pub keys: Keyring,
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
    pub fn new(config: Arc<Config>, engine: Arc<Engine>, images: Images, keys: Keyring) -> Self {
        let access = AccessRules { keys: keys.clone(), open_proxy: config.server.open_proxy };
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
        Self { config, keys, engine, images, ingress, rules: Arc::new(rules) }
    }

    /// The sandbox, if there is one for this caller: another tenant's looks as if it did not exist.
    pub(super) fn find(&self, principal: &Principal, id: &str) -> ApiResult<Entry> {
        let entry = self.engine.find(id)?;
        if principal.may_see(entry.tenant()) { Ok(entry) } else { Err(ApiError::sandbox_not_found()) }
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
        tenant: entry.tenant().map(str::to_owned),
    })
}
