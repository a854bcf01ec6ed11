//! How much memory all streams together may hold for clients that read slowly.
//!
//! Every chunk of events counts from when it is made until it is written to its connection, and so does the part of a
//! line that is held back. Up to [`PLENTY`] a stream reads as much as is there; beyond it each reads and holds back
//! little, so none of them stands still because of the others.
//! Invariant: at most `PLENTY`, one burst of a single stream (about 6 MiB), and 128 KiB a stream are held.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;

use super::pipes;
use crate::lines;

const PLENTY: usize = 24 << 20;

/// What one read may take and hold back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    pub read: usize,
    pub line: usize,
}

const GENEROUS: Share = Share { read: pipes::READ, line: lines::MAX_LINE };
/// An empty line becomes some seventy bytes of event, and three such chunks of a stream may be under way.
const TIGHT: Share = Share { read: 512, line: 8 << 10 };

/// What the streams of one agent hold.
#[derive(Debug, Default)]
pub struct Output {
    held: AtomicUsize,
}

impl Output {
    pub(super) fn share(&self) -> Share {
        if self.held.load(Ordering::Relaxed) < PLENTY { GENEROUS } else { TIGHT }
    }

    /// The chunk, counted for as long as it exists.
    pub(super) fn chunk(self: &Arc<Self>, bytes: Vec<u8>) -> Bytes {
        let mut held = Held::new(self);
        held.set(bytes.capacity());
        Bytes::from_owner(Counted { bytes, _held: held })
    }
}

struct Counted {
    bytes: Vec<u8>,
    _held: Held,
}

impl AsRef<[u8]> for Counted {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// One holder's part; given back when it is dropped.
pub(super) struct Held {
    output: Arc<Output>,
    bytes: usize,
}

impl Held {
    pub(super) fn new(output: &Arc<Output>) -> Self {
        Held { output: Arc::clone(output), bytes: 0 }
    }

    pub(super) fn set(&mut self, bytes: usize) {
        if bytes != self.bytes {
            self.output.held.fetch_add(bytes, Ordering::Relaxed);
            self.output.held.fetch_sub(self.bytes, Ordering::Relaxed);
            self.bytes = bytes;
        }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.set(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_is_counted_until_it_is_gone() {
        let output = Arc::new(Output::default());
        assert_eq!(output.share(), GENEROUS);
        let chunk = output.chunk(vec![0; PLENTY]);
        let part = chunk.slice(..1);
        drop(chunk);
        assert_eq!(output.share(), TIGHT);
        drop(part);
        assert_eq!(output.share(), GENEROUS);
        let mut held = Held::new(&output);
        held.set(PLENTY + 5);
        held.set(PLENTY);
        assert_eq!(output.share(), TIGHT);
        drop(held);
        assert_eq!(output.held.load(Ordering::Relaxed), 0);
    }
}
