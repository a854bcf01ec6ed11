//! How much is going on, for whoever decides that a sandbox is idle.

use std::sync::Arc;

use tokio::sync::watch;

/// A view of a server that may be kept and cloned.
#[derive(Debug, Clone)]
pub struct Activity {
    sessions: watch::Receiver<usize>,
    counter: Counter,
}

#[derive(Debug, Clone)]
pub(crate) struct Counter(Arc<watch::Sender<usize>>);

/// Counts as one session while it is alive.
#[derive(Debug)]
pub(crate) struct Counted(Arc<watch::Sender<usize>>);

impl Activity {
    pub(crate) fn new() -> Self {
        let (sender, sessions) = watch::channel(0);
        Activity { sessions, counter: Counter(Arc::new(sender)) }
    }

    /// Programs, shells and file transfers that run now. A connection that only forwards ports, or does nothing, is none.
    pub fn sessions(&self) -> usize {
        *self.sessions.borrow()
    }

    /// Waits until the number is another one than at the last call.
    pub async fn changed(&mut self) {
        // The sender lives as long as this value.
        let _ = self.sessions.changed().await;
    }

    pub(crate) fn count(&self) -> Counted {
        self.counter.0.send_modify(|sessions| *sessions += 1);
        Counted(Arc::clone(&self.counter.0))
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|sessions| *sessions -= 1);
    }
}
