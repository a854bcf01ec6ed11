//! Work that a request leaves behind without waiting for it.
//!
//! Invariant: what does not fit is dropped at once, so that nothing outside can slow a request down. Bounded by the queue's length.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::TaskTracker;

/// A bounded queue with its workers.
#[derive(Clone, Debug)]
pub(super) struct Queue<T> {
    sender: mpsc::Sender<T>,
    dropped: Arc<AtomicU64>,
}

impl<T: Send + 'static> Queue<T> {
    /// Starts `at_once` workers, which end with the last clone of the queue and finish what is in it.
    pub(super) fn start<F>(
        (length, at_once): (usize, usize),
        tasks: &TaskTracker,
        work: impl Fn(T) -> F + Send + 'static,
    ) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, waiting) = mpsc::channel(length.max(1));
        tasks.spawn(ReceiverStream::new(waiting).for_each_concurrent(at_once, work));
        Self { sender, dropped: Arc::default() }
    }

    pub(super) fn put(&self, item: T) {
        if self.sender.try_send(item).is_err() && self.dropped.fetch_add(1, Relaxed).is_power_of_two() {
            tracing::warn!("the other side is slow: what it is told about requests is dropped");
        }
    }
}
