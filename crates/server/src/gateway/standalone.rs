//! A gateway that runs alone and learns from a server.

use std::net::{IpAddr, TcpListener};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Url;
use sandglass_ingress::{Door, Generation, Keys};
use sandglass_sandbox::{Clock as _, SystemClock};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tracing::info;

use super::audit::{Audit, AuditSettings};
use super::directory::{Directory, Used};
use super::feed::{FeedError, Server};
use super::handler::{Gateway, GatewaySettings, RouteFrom};
use super::intents::{IntentSettings, Intents};
use super::mirror::Mirror;
use super::serving::{Door as Listening, GatewayLimits, carrier};
use crate::config::Secret;
use crate::ingress::{Lookup, NotWoken, Park, Reach, Target, Waking};
use crate::listener::{CertificateError, Certificates};

/// What `sandglass ingress` was told.
#[derive(Debug)]
pub struct Options {
    pub listen: String,
    pub server: Url,
    pub key: Secret,
    pub route: RouteFrom,
    pub keys: Keys,
    /// The weakest signatures that open anything.
    pub accepts: Generation,
    pub intents: Option<IntentSettings>,
    pub audit: Option<AuditSettings>,
    pub park: Option<Park>,
    /// Where the ports of sandboxes are published, seen from here.
    pub published_on: Option<IpAddr>,
    /// How long the server may take to be there at the start.
    pub patience: Duration,
    pub limits: GatewayLimits,
    /// Certificate chain and key; plain HTTP without.
    pub tls: Option<(PathBuf, PathBuf)>,
}

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("cannot listen on {address}: {source}")]
    Listen { address: String, source: std::io::Error },
    #[error("cannot serve TLS: {0}")]
    Certificate(#[from] CertificateError),
    #[error("cannot make an HTTP client: {0}")]
    Client(#[from] reqwest::Error),
    #[error(transparent)]
    Feed(FeedErrorText),
    #[error("the server has not told of its sandboxes within {} s", .0.as_secs())]
    Sync(Duration),
}

/// What was wrong with the server, in words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct FeedErrorText(String);

impl From<FeedError> for RunError {
    fn from(error: FeedError) -> Self {
        Self::Feed(FeedErrorText(error.to_string()))
    }
}

/// The server's knowledge and the server itself.
struct Remote {
    mirror: Arc<Mirror>,
    server: Server,
    intents: Option<Intents>,
}

impl Lookup for Remote {
    fn target(&self, id: &str) -> Option<Target> {
        self.mirror.find(id, SystemClock.now())
    }

    fn wake(&self, id: &str) -> Waking {
        let (server, mirror, id) = (self.server.clone(), self.mirror.clone(), id.to_owned());
        Box::pin(async move {
            let mut changes = mirror.changes();
            server.wake(&id).await.map_err(|error| {
                tracing::warn!(sandbox = id, %error, "in use, but could not be resumed");
                NotWoken::Failed
            })?;
            // The server knows before it tells.
            while mirror.find(&id, SystemClock.now()).is_some_and(|t| matches!(t.reach, Reach::Paused(_))) {
                changes.changed().await.map_err(|_| NotWoken::Later)?;
            }
            Ok(())
        })
    }
}

impl Directory for Remote {
    fn changes(&self) -> watch::Receiver<u64> {
        self.mirror.changes()
    }

    fn lag(&self) -> Duration {
        Duration::from_millis(300)
    }

    fn counts(&self, renews: bool) -> bool {
        self.intents.as_ref().is_some_and(|intents| intents.counts(renews))
    }

    fn told(&self, used: Used<'_>) {
        if let Some(intents) = &self.intents {
            intents.used(used);
        }
    }
}

/// Serves until `stop`; then lets what is under way end.
///
/// # Errors
/// When it cannot start.
pub async fn run(options: Options, stop: CancellationToken) -> Result<(), RunError> {
    let Options { listen, route, keys, accepts, park, patience, limits, .. } = options;
    let listener =
        TcpListener::bind(&listen).map_err(|source| RunError::Listen { address: listen.clone(), source })?;
    let certificates =
        options.tls.map(|(certificate, key)| Certificates::open(&certificate, &key)).transpose()?;
    let server = Server::new(options.server, options.key)?;
    let carrier = carrier();
    let mirror = Arc::new(Mirror::new(carrier.clone(), options.published_on));
    let tasks = TaskTracker::new();
    let intents = options.intents.map(|settings| Intents::start(settings, &server, &tasks));
    let audit = options.audit.map(|settings| Audit::start(settings, &tasks)).transpose()?;
    // Ends after the last request, so that what is removed meanwhile is still cut.
    let over = CancellationToken::new();
    let mut following = {
        let (server, mirror, over) = (server.clone(), mirror.clone(), over.clone());
        tokio::spawn(async move { server.follow(&mirror, &over).await })
    };
    tokio::select! {
        () = mirror.wait_whole() => {}
        ended = &mut following => {
            let refused = ended.ok().and_then(Result::err);
            return refused.map_or(Ok(()), |error| Err(error.into()));
        }
        () = tokio::time::sleep(patience) => return Err(RunError::Sync(patience)),
        () = stop.cancelled() => return Ok(()),
    }
    let directory = Arc::new(Remote { mirror, server, intents });
    let settings = GatewaySettings { route, door: Door::new(keys, accepts), park, audit };
    let gateway = Gateway::new(directory, carrier.clone(), settings);
    if let Some(certificates) = &certificates {
        tasks.spawn(certificates.clone().watch(stop.clone(), |_| {}));
    }
    let drain = limits.drain;
    let door = Listening::open(listener, (gateway, carrier), (certificates, limits), stop.clone())
        .map_err(|source| RunError::Listen { address: listen, source })?;
    info!(address = %door.address(), "listening");
    stop.cancelled().await;
    info!("stopping; requests under way may end");
    door.close(drain).await;
    over.cancel();
    let _ = following.await;
    tasks.close();
    // What was queued is sent; the queues end with the gateway, which is gone by now.
    let _ = tokio::time::timeout(drain, tasks.wait()).await;
    Ok(())
}
