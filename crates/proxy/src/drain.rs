//! Counts what is in flight and ends it in order: no new work, a grace period, then a cut.
//!
//! The invariant: whatever was counted in is counted out when its guard is dropped, however it ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::sync::Notify;

/// What is in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests whose response body has not ended.
    pub requests: usize,
    /// Upgraded connections.
    pub upgrades: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Request,
    Upgrade,
}

#[derive(Debug, Default)]
struct Shared {
    closing: AtomicBool,
    requests: AtomicUsize,
    upgrades: AtomicUsize,
    left: Notify,
}

impl Shared {
    fn counter(&self, kind: Kind) -> &AtomicUsize {
        match kind {
            Kind::Request => &self.requests,
            Kind::Upgrade => &self.upgrades,
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Drain {
    shared: Arc<Shared>,
}

/// One thing in flight.
#[derive(Debug)]
pub(crate) struct Active {
    shared: Arc<Shared>,
    kind: Kind,
}

impl Drop for Active {
    fn drop(&mut self) {
        self.shared.counter(self.kind).fetch_sub(1, Ordering::SeqCst);
        if self.shared.closing.load(Ordering::SeqCst) {
            self.shared.left.notify_waiters();
        }
    }
}

impl Drain {
    /// `None` once draining has begun.
    pub(crate) fn enter(&self, kind: Kind) -> Option<Active> {
        // Counted before the check: a drain that starts in between sees this guard and waits for it.
        self.shared.counter(kind).fetch_add(1, Ordering::SeqCst);
        let active = Active { shared: Arc::clone(&self.shared), kind };
        (!self.shared.closing.load(Ordering::SeqCst)).then_some(active)
    }

    pub(crate) fn counts(&self) -> Counts {
        Counts {
            requests: self.shared.requests.load(Ordering::SeqCst),
            upgrades: self.shared.upgrades.load(Ordering::SeqCst),
        }
    }

    pub(crate) fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::SeqCst)
    }

    /// Refuses new work and waits for the rest; what is still there after `grace` is returned.
    pub(crate) async fn close(&self, grace: Duration) -> Counts {
        self.shared.closing.store(true, Ordering::SeqCst);
        let all_left = async {
            loop {
                let mut left = std::pin::pin!(self.shared.left.notified());
                left.as_mut().enable();
                if self.counts() == Counts::default() {
                    return;
                }
                left.await;
            }
        };
        let _ = tokio::time::timeout(grace, all_left).await;
        self.counts()
    }
}
