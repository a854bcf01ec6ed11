//! Where the gateway looks sandboxes up.

use std::sync::{Arc, Weak};
use std::time::Duration;

use async_trait::async_trait;
use tokio::sync::watch;

use crate::engine::Engine;
use crate::ingress::{Lookup, Target};

/// A sandbox was not resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox was not resumed")]
pub struct WakeError;

/// What is known of sandboxes, from memory, and the one thing that can be done about them.
#[async_trait]
pub trait Directory: Send + Sync + 'static {
    /// `None` when there is no such sandbox.
    fn find(&self, id: &str) -> Option<Target>;

    /// Moves with whatever `find` answers.
    fn changes(&self) -> watch::Receiver<u64>;

    /// For how long a sandbox that was just made may not be known here.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }

    /// Resumes a paused sandbox; returns when it runs.
    async fn wake(&self, id: &str) -> Result<(), WakeError>;

    /// A request was admitted.
    fn used(&self, used: Used<'_>);
}

/// One use of a sandbox.
#[derive(Clone, Copy, Debug)]
pub struct Used<'a> {
    pub id: &'a str,
    pub port: u16,
    /// The path that was passed on, where the route was taken out of it.
    pub path: Option<&'a str>,
    /// Whether use extends its life.
    pub renews: bool,
}

/// The server's own knowledge, for the gateway within it.
pub struct InProcess {
    pub lookup: Arc<dyn Lookup>,
    /// Weak: the engine holds what holds this.
    pub engine: Weak<Engine>,
}

#[async_trait]
impl Directory for InProcess {
    fn find(&self, id: &str) -> Option<Target> {
        self.lookup.target(id)
    }

    fn changes(&self) -> watch::Receiver<u64> {
        // A receiver whose sender is gone reports that, and whoever waits gives up.
        self.engine.upgrade().map_or_else(|| watch::channel(0).1, |engine| engine.index().changes())
    }

    async fn wake(&self, id: &str) -> Result<(), WakeError> {
        let engine = self.engine.upgrade().ok_or(WakeError)?;
        engine.resume(id).await.map_err(|error| {
            tracing::warn!(sandbox = id, %error, "in use, but could not be resumed");
            WakeError
        })
    }

    fn used(&self, used: Used<'_>) {
        self.lookup.used(used.id);
    }
}
