//! The gateway's listener.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use axum::response::Response;
use sandglass_ingress::{Door as Access, Generation, Key, Keys};
use sandglass_proxy::{Forwarder, Limits as Backend};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tracing::info;

use super::handler::{Gateway, GatewaySettings, RouteFrom};
use super::refused;
use crate::config::{IngressConfig, RouteMode};
use crate::ingress::{Carrier, Park};
use crate::listener::{self, Certificates, Limits, Malformed, Serving, Transport};

/// Programs behind a gateway may think for as long as they like: who waits decides for how long.
const ANSWER: Duration = Duration::from_secs(7 * 24 * 3600);

/// The way to sandboxes, without a limit on how long an answer may take.
#[must_use]
pub fn carrier() -> Carrier {
    Carrier::new(Forwarder::new(Backend { response_head: ANSWER, ..Backend::default() }))
}

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub struct GatewayLimits {
    /// Open connections; 0 means half of what this process may open.
    pub connections: usize,
    /// How long a request's head may take.
    pub head: Duration,
    /// How long requests and upgraded connections may take at the end.
    pub drain: Duration,
}

impl Default for GatewayLimits {
    fn default() -> Self {
        let Limits { head, drain, .. } = Limits::default();
        Self { connections: 0, head, drain }
    }
}

/// An open listener and what leads from it to sandboxes.
#[derive(Debug)]
pub struct Door {
    address: SocketAddr,
    serving: JoinHandle<()>,
    carrier: Carrier,
}

impl Door {
    /// Serves until `stop`, then drains.
    ///
    /// # Errors
    /// When the listener cannot be used.
    pub fn open(
        listener: TcpListener,
        (gateway, carrier): (Gateway, Carrier),
        (certificates, limits): (Option<Arc<Certificates>>, GatewayLimits),
        stop: CancellationToken,
    ) -> std::io::Result<Self> {
        let address = listener.local_addr()?;
        let all = Limits::default();
        let limits = Limits {
            head: limits.head,
            // As the body of a request may be as slow as its sender likes.
            body_silence: ANSWER,
            drain: limits.drain,
            connections: if limits.connections == 0 { all.connections } else { limits.connections },
            ..all
        };
        let transport = certificates.map_or(Transport::Plain, Transport::Tls);
        let serving = Serving { answers: Arc::new(gateway), refuse, transport, limits };
        Ok(Self { address, serving: listener::spawn(listener, serving, stop)?, carrier })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits for what is under way, once it was told to stop.
    pub async fn close(self, drain: Duration) {
        let (_, cut) = tokio::join!(self.serving, self.carrier.drain(drain));
        if cut.upgrades > 0 {
            info!(upgrades = cut.upgrades, "upgraded connections that were still open were cut");
        }
    }
}

/// What is refused for its form, in the gateway's words.
fn refuse(malformed: Malformed) -> Response {
    refused::plain(malformed.status(), &malformed)
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
            door: Access::new(keys, accepts),
            park: Some(Park::default()),
            audit: None,
        }
    }
}
