//! How much is in use, for whoever decides that a box is idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Counts what is held.
#[derive(Debug, Default)]
pub struct Gauge(Arc<AtomicUsize>);

/// Counts as one while it is alive.
#[derive(Debug)]
pub struct Held(Arc<AtomicUsize>);

impl Gauge {
    pub fn hold(&self) -> Held {
        self.0.fetch_add(1, Ordering::Relaxed);
        Held(Arc::clone(&self.0))
    }

    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
