//! What channels hold back of what the peer sent, and how the peer is slowed down.
//!
//! The protocol library opens a channel's window again as soon as data arrives, not when it is used up. All that can be
//! chosen is how far it opens, for all channels of the connection together, and only when it has just opened one. So a
//! channel that lags narrows every next opening to [`NARROW`] bytes: the peer then asks again with each of these small
//! packets, a [`BREATH`] apart, until nothing lags. One lagging channel thereby slows the data that the peer sends on the
//! others of the same connection once their windows are used up; the other direction is not touched.
//!
//! Invariant: a channel holds at most [`OVERRUN`] bytes; a peer that gets there has ignored its window and is cut off.

use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::transport::Breath;

/// The window of a channel: what may be on its way to us.
pub(crate) const WINDOW: u32 = 1 << 20;
/// Holding more than this back is lagging.
const LAGGING: usize = WINDOW as usize / 2;
/// A well-behaved peer gets to `LAGGING + WINDOW` and then adds two bytes a breath.
const OVERRUN: usize = 8 * WINDOW as usize;
/// With one byte the window would never open again.
const NARROW: u32 = 2;
const BREATH: Duration = Duration::from_millis(10);
/// After this many in a row, the peer is not about to be read soon.
const PATIENCE: u32 = 100;
const LONG_BREATH: Duration = Duration::from_millis(200);
/// The most that a reader gets at once.
const PIECE: usize = 64 << 10;

/// The flow of one connection.
#[derive(Debug, Default)]
pub(crate) struct Flow {
    lagging: AtomicUsize,
    /// Breaths since anything caught up.
    breaths: AtomicU32,
    breath: Arc<Breath>,
}

impl Flow {
    pub(crate) fn new(breath: Arc<Breath>) -> Self {
        Flow { breath, ..Flow::default() }
    }

    /// How far the next window opens, asked after one was opened `current` far.
    pub(crate) fn next_window(&self, current: u32) -> u32 {
        if self.lagging.load(Ordering::Acquire) == 0 {
            return WINDOW;
        }
        if current == NARROW {
            let patient = self.breaths.fetch_add(1, Ordering::Relaxed) < PATIENCE;
            self.breath.until(Instant::now() + if patient { BREATH } else { LONG_BREATH });
        }
        NARROW
    }

    fn lags(&self) {
        self.lagging.fetch_add(1, Ordering::AcqRel);
    }

    fn caught_up(&self) {
        self.lagging.fetch_sub(1, Ordering::AcqRel);
        self.breaths.store(0, Ordering::Relaxed);
    }
}

/// What the peer sent on one channel and nobody has taken yet. One side fills it, one takes.
#[derive(Debug, Clone)]
pub(crate) struct Inbox {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    held: Mutex<Held>,
    arrived: Notify,
    flow: Arc<Flow>,
}

#[derive(Debug, Default)]
struct Held {
    bytes: BytesMut,
    ended: bool,
    /// Nobody will take any more.
    discarding: bool,
    lagging: bool,
}

/// The peer has sent far more than its window allows.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Overrun;

impl Inbox {
    pub(crate) fn new(flow: Arc<Flow>) -> Self {
        let held = Mutex::new(Held::default());
        Inbox { shared: Arc::new(Shared { held, arrived: Notify::new(), flow }) }
    }

    pub(crate) fn push(&self, data: &[u8]) -> Result<(), Overrun> {
        let mut held = self.shared.lock();
        if held.discarding || held.ended {
            return Ok(());
        }
        if held.bytes.len() + data.len() > OVERRUN {
            return Err(Overrun);
        }
        held.bytes.extend_from_slice(data);
        self.shared.weigh(&mut held);
        drop(held);
        self.shared.arrived.notify_one();
        Ok(())
    }

    /// Nothing more will come; what is held can still be taken.
    pub(crate) fn end(&self) {
        self.shared.lock().ended = true;
        self.shared.arrived.notify_one();
    }

    /// Drops what is held and what is still to come.
    pub(crate) fn discard(&self) {
        let mut held = self.shared.lock();
        held.discarding = true;
        held.bytes = BytesMut::new();
        self.shared.weigh(&mut held);
        drop(held);
        self.shared.arrived.notify_one();
    }

    /// The next piece; none at the end.
    pub(crate) async fn next(&self) -> Option<Bytes> {
        loop {
            {
                let mut held = self.shared.lock();
                if !held.bytes.is_empty() {
                    let most = held.bytes.len().min(PIECE);
                    let piece = held.bytes.split_to(most).freeze();
                    self.shared.weigh(&mut held);
                    return Some(piece);
                }
                if held.ended || held.discarding {
                    return None;
                }
            }
            self.shared.arrived.notified().await;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn weigh(&self, held: &mut Held) {
        let lagging = held.bytes.len() > LAGGING;
        if lagging != held.lagging {
            held.lagging = lagging;
            if lagging {
                self.flow.lags();
            } else {
                self.flow.caught_up();
            }
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        if held.lagging {
            self.flow.caught_up();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_lagging_channel_narrows_the_window_until_it_has_caught_up() {
        let flow = Arc::new(Flow::default());
        let inbox = Inbox::new(Arc::clone(&flow));
        assert_eq!(flow.next_window(WINDOW), WINDOW);
        inbox.push(&vec![7; LAGGING + 1]).unwrap();
        assert_eq!(flow.next_window(WINDOW), NARROW);
        assert_eq!(inbox.next().await.unwrap().len(), PIECE);
        assert_eq!(flow.next_window(NARROW), WINDOW);
    }

    #[tokio::test]
    async fn what_a_channel_holds_is_bounded_and_a_dropped_one_does_not_lag() {
        let flow = Arc::new(Flow::default());
        let inbox = Inbox::new(Arc::clone(&flow));
        inbox.push(&vec![7; OVERRUN]).unwrap();
        assert_eq!(inbox.push(b"x"), Err(Overrun));
        drop(inbox);
        assert_eq!(flow.next_window(NARROW), WINDOW);
        let inbox = Inbox::new(Arc::clone(&flow));
        inbox.push(&vec![7; LAGGING + 1]).unwrap();
        inbox.discard();
        assert_eq!(flow.next_window(NARROW), WINDOW);
        assert_eq!(inbox.push(&vec![7; OVERRUN + 1]), Ok(()));
        assert_eq!(inbox.next().await, None);
    }

    #[tokio::test]
    async fn what_came_before_the_end_is_still_taken() {
        let inbox = Inbox::new(Arc::default());
        inbox.push(b"ab").unwrap();
        inbox.end();
        inbox.push(b"late").unwrap();
        assert_eq!(inbox.next().await.as_deref(), Some(&b"ab"[..]));
        assert_eq!(inbox.next().await, None);
    }
}
