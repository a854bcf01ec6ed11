//! Where the gateway looks sandboxes up.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::watch;

use crate::engine::Engine;
use crate::ingress::{Lookup, Target, Waking};

/// A look-up that can be followed, and that is told more about uses.
pub trait Directory: Lookup + 'static {
    /// Moves with whatever look-ups answer.
    fn changes(&self) -> watch::Receiver<u64>;

    /// For how long a sandbox that was just made may not be known here.
    fn lag(&self) -> Duration {
        Duration::ZERO
    }

    /// Whether somebody wants to know of use of a sandbox whose life it extends, or does not.
    fn counts(&self, renews: bool) -> bool {
        renews
    }

    /// A request was admitted, or bytes of an admitted one still move.
    fn told(&self, used: Used<'_>);
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
    /// Not a request of its own: bytes move on a connection that is open since an earlier one.
    pub lasts: bool,
}

/// The server's own knowledge, for the gateway within it.
pub struct InProcess {
    pub lookup: Arc<dyn Lookup>,
    /// Weak: the engine holds what holds this.
    pub engine: Weak<Engine>,
}

impl Lookup for InProcess {
    fn target(&self, id: &str) -> Option<Target> {
        self.lookup.target(id)
    }

    fn complete(&self) -> bool {
        self.lookup.complete()
    }

    fn wake(&self, id: &str) -> Waking {
        self.lookup.wake(id)
    }
}

impl Directory for InProcess {
    fn changes(&self) -> watch::Receiver<u64> {
        // A receiver whose sender is gone reports that, and whoever waits gives up.
        self.engine.upgrade().map_or_else(|| watch::channel(0).1, |engine| engine.index().changes())
    }

    fn told(&self, used: Used<'_>) {
        if used.lasts {
            self.lookup.lasts(used.id);
        } else {
            self.lookup.used(used.id);
        }
    }
}
