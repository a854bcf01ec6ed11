//! The last output of a terminal, addressed by the offset of every byte it ever wrote.
//!
//! It is what late readers are shown and also the queue of those that are connected: each has an offset of its own,
//! so a reader costs no memory and one that is too slow misses the oldest bytes.
//! Invariant: at most [`CAPACITY`] bytes and [`MAX_RUNS`] changes of stream are kept.

use std::collections::VecDeque;

pub(super) const CAPACITY: usize = 1 << 20;
/// Streams that alternate more often than this are told apart only near the end.
const MAX_RUNS: usize = 4096;

/// Which stream of a shell without a terminal wrote something; a terminal has only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Origin {
    Out,
    Err,
}

#[derive(Debug, Default)]
pub(super) struct Ring {
    bytes: VecDeque<u8>,
    end: u64,
    /// Where a stretch of one stream begins.
    runs: VecDeque<(u64, Origin)>,
}

impl Ring {
    pub(super) fn append(&mut self, origin: Origin, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        if self.runs.back().is_none_or(|(_, last)| *last != origin) {
            self.runs.push_back((self.end, origin));
        }
        self.end += bytes.len() as u64;
        let kept = &bytes[bytes.len().saturating_sub(CAPACITY)..];
        let excess = (self.bytes.len() + kept.len()).saturating_sub(CAPACITY);
        self.bytes.drain(..excess);
        self.bytes.extend(kept);
        let start = self.start();
        while self.runs.len() > MAX_RUNS || self.runs.get(1).is_some_and(|(at, _)| *at <= start) {
            self.runs.pop_front();
        }
    }

    /// Bytes ever written.
    pub(super) fn end(&self) -> u64 {
        self.end
    }

    pub(super) fn start(&self) -> u64 {
        self.end - self.bytes.len() as u64
    }

    /// At most `most` bytes from an offset on, or from the oldest kept byte; and the offset they begin at.
    pub(super) fn read(&self, from: u64, most: usize) -> (u64, Vec<u8>) {
        let from = from.clamp(self.start(), self.end);
        let skip = usize::try_from(from - self.start()).unwrap_or(usize::MAX);
        let count = most.min(self.bytes.len() - skip);
        let (head, tail) = self.bytes.as_slices();
        let mut out = Vec::with_capacity(count);
        if skip < head.len() {
            out.extend_from_slice(&head[skip..head.len().min(skip + count)]);
        }
        let rest = count - out.len();
        if rest > 0 {
            let at = (skip + out.len()) - head.len();
            out.extend_from_slice(&tail[at..at + rest]);
        }
        (from, out)
    }

    /// The stream that the byte at an offset is of, and where the next stretch begins.
    pub(super) fn origin(&self, at: u64) -> (Origin, u64) {
        let next = self.runs.partition_point(|(start, _)| *start <= at);
        let origin = next.checked_sub(1).and_then(|run| self.runs.get(run)).map_or(Origin::Out, |run| run.1);
        (origin, self.runs.get(next).map_or(self.end, |run| run.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn old_bytes_go_and_the_offset_tells() {
        let mut ring = Ring::default();
        ring.append(Origin::Out, &vec![b'a'; CAPACITY]);
        ring.append(Origin::Err, b"bcd");
        assert_eq!((ring.start(), ring.end()), (3, CAPACITY as u64 + 3));
        assert_eq!(ring.read(0, 2), (3, b"aa".to_vec()));
        assert_eq!(ring.read(CAPACITY as u64 + 1, 9), (CAPACITY as u64 + 1, b"cd".to_vec()));
        assert_eq!(ring.read(u64::MAX, 9), (ring.end(), Vec::new()));
        assert_eq!(ring.origin(5), (Origin::Out, CAPACITY as u64));
        assert_eq!(ring.origin(CAPACITY as u64), (Origin::Err, ring.end()));
    }

    #[test]
    fn alternating_streams_stay_bounded() {
        let mut ring = Ring::default();
        for _ in 0..MAX_RUNS {
            ring.append(Origin::Out, b"o");
            ring.append(Origin::Err, b"e");
        }
        assert!(ring.runs.len() <= MAX_RUNS);
        assert_eq!(ring.origin(ring.end() - 1).0, Origin::Err);
    }

    proptest! {
        #[test]
        fn what_is_read_is_what_was_written(
            pieces in proptest::collection::vec((any::<bool>(), 1usize..400_000), 1..8),
            from in 0u64..3_000_000,
            most in 0usize..500_000,
        ) {
            let (mut ring, mut all, mut of) = (Ring::default(), Vec::new(), Vec::new());
            for (number, (err, len)) in pieces.iter().enumerate() {
                let origin = if *err { Origin::Err } else { Origin::Out };
                let bytes: Vec<u8> = (0..*len).map(|i| u8::try_from((i * 7 + number) % 251).unwrap()).collect();
                ring.append(origin, &bytes);
                all.extend_from_slice(&bytes);
                of.extend(std::iter::repeat_n(origin, *len));
            }
            let (at, read) = ring.read(from, most);
            let begin = usize::try_from(at).unwrap();
            prop_assert_eq!(&read[..], &all[begin..begin + read.len()]);
            prop_assert!(read.len() == most || begin + read.len() == all.len());
            if begin < all.len() {
                let (origin, until) = ring.origin(at);
                let until = usize::try_from(until).unwrap();
                prop_assert!(of[begin..until].iter().all(|o| *o == origin), "a stretch of one stream");
                prop_assert!(until == all.len() || of[until] != origin, "no longer one");
            }
        }
    }
}
