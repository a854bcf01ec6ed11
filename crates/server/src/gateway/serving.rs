//! The gateway's listener.

use std::net::TcpListener;

use sandglass_ingress::{Door, Generation, Key, Keys};
use sandglass_proxy::{Forwarder, Limits};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::handler::{self, Gateway, GatewaySettings, RouteFrom};
use super::standalone::GatewayLimits;
use super::wake::ParkSettings;
use crate::accept;
use crate::config::{IngressConfig, RouteMode};
use crate::ingress::Carrier;

/// Programs behind a gateway may think for as long as they like: who waits decides for how long.
const ANSWER: Duration = Duration::from_secs(7 * 24 * 3600);

/// The way to sandboxes, without limits on silence.
#[must_use]
pub fn carrier() -> Carrier {
    Carrier::new(Forwarder::new(Limits { response_head: ANSWER, ..Limits::default() }))
}

/// Serves until `stop`, then drains.
pub(crate) fn start(
    listener: TcpListener,
    gateway: Gateway,
    limits: GatewayLimits,
    stop: CancellationToken,
) -> std::io::Result<JoinHandle<()>> {
    let connections =
        if limits.connections == 0 { accept::connection_limit() } else { limits.connections };
    let limits = accept::Limits { keep_alive: limits.head, drain: limits.drain, connections };
    accept::spawn(listener, handler::router(gateway), stop, limits)
}

impl GatewaySettings {
    /// For the gateway within a server.
    #[must_use]
    pub fn of(config: &IngressConfig) -> Self {
        let path = config.gateway.as_ref().is_some_and(|gateway| gateway.route == RouteMode::Uri);
        let access = config.secure_access.as_ref();
        let keys = access.iter().flat_map(|access| &access.keys);
        let keys = Keys::new(keys.map(|key| Key { id: key.id, secret: key.key.clone() }));
        let accepts = access.map_or(Generation::Full, |access| access.signature.into());
        Self {
            route: if path { RouteFrom::Path } else { RouteFrom::HeaderOrHost },
            door: Door::new(keys, accepts),
            park: Some(ParkSettings::default()),
            audit: None,
        }
    }
}
