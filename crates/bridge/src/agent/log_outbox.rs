//! Log bytes on their way. Bounded: what does not fit is dropped oldest first, and the jump of the offset says so.
//!
//! Logs may be lost by a long outage; what must not be lost is an event.

use std::collections::VecDeque;

use crate::wire::limits::{MAX_LOG_FRAME_BYTES, MAX_LOGS_BYTES};
use crate::wire::{AckedLog, LogBytes, LogFrame, LogsRequest};

/// Bytes that wait at most.
const MOST_BYTES: usize = 2 * 1024 * 1024;
/// What a frame costs beside its bytes.
const FRAME_COST: usize = 128;

#[derive(Debug, Default)]
pub(super) struct LogOutbox {
    frames: VecDeque<LogFrame>,
    cost: usize,
}

impl LogOutbox {
    pub fn push(&mut self, source: &str, stream: &str, offset: u64, bytes: &[u8]) {
        for (index, piece) in bytes.chunks(MAX_LOG_FRAME_BYTES).enumerate() {
            let offset = offset + (index * MAX_LOG_FRAME_BYTES) as u64;
            self.push_piece(source, stream, offset, piece);
        }
        while self.cost > MOST_BYTES
            && let Some(oldest) = self.frames.pop_front()
        {
            self.cost -= cost(&oldest);
        }
    }

    fn push_piece(&mut self, source: &str, stream: &str, offset: u64, bytes: &[u8]) {
        if let Some(last) = self.frames.back_mut()
            && (last.source.as_str(), last.stream.as_str(), last.end()) == (source, stream, offset)
            && last.data.0.len() + bytes.len() <= MAX_LOG_FRAME_BYTES
        {
            last.data.0.extend_from_slice(bytes);
            self.cost += bytes.len();
            return;
        }
        let frame = LogFrame {
            source: source.to_owned(),
            stream: stream.to_owned(),
            offset,
            data: LogBytes(bytes.to_vec()),
        };
        self.cost += cost(&frame);
        self.frames.push_back(frame);
    }

    pub fn is_empty(&self) -> bool {
        self.frames.is_empty()
    }

    /// The oldest frames that fit one request.
    pub fn batch(&self) -> LogsRequest {
        let mut bytes = 0;
        let fits = |frame: &&LogFrame| {
            bytes += cost(frame);
            bytes <= MAX_LOGS_BYTES
        };
        LogsRequest { frames: self.frames.iter().take_while(fits).cloned().collect() }
    }

    /// Forgets the frames of the next batch: the server will not take them.
    pub fn discard_batch(&mut self) {
        self.frames.drain(..self.batch().frames.len());
        self.cost = self.frames.iter().map(cost).sum();
    }

    /// Forgets what the server has. Returns whether that was anything.
    pub fn ack(&mut self, acked: &[AckedLog]) -> bool {
        let before = self.frames.len();
        let stored = |frame: &LogFrame| {
            acked.iter().any(|log| {
                (&log.source, &log.stream) == (&frame.source, &frame.stream) && frame.end() <= log.offset
            })
        };
        self.frames.retain(|frame| !stored(frame));
        self.cost = self.frames.iter().map(cost).sum();
        self.frames.len() < before
    }
}

fn cost(frame: &LogFrame) -> usize {
    frame.data.0.len() + frame.source.len() + frame.stream.len() + FRAME_COST
}

#[cfg(test)]
mod tests {
    use super::*;

    fn acked(source: &str, offset: u64) -> AckedLog {
        AckedLog { source: source.into(), stream: "stdout".into(), offset }
    }

    #[test]
    fn consecutive_bytes_travel_together_until_they_are_acknowledged() {
        let mut outbox = LogOutbox::default();
        outbox.push("a", "stdout", 0, b"one ");
        outbox.push("a", "stdout", 4, b"two");
        outbox.push("b", "stdout", 0, b"x");
        outbox.push("a", "stdout", 7, b"!");
        let frames = outbox.batch().frames;
        let texts: Vec<_> =
            frames.iter().map(|f| (f.source.as_str(), f.offset, f.data.0.as_slice())).collect();
        assert_eq!(texts, [("a", 0, &b"one two"[..]), ("b", 0, b"x"), ("a", 7, b"!")]);
        assert!(outbox.ack(&[acked("a", 7)]) && !outbox.ack(&[acked("a", 7)]));
        assert!(outbox.ack(&[acked("a", 8), acked("b", 1)]) && outbox.is_empty());
        assert_eq!(outbox.cost, 0);
    }

    #[test]
    fn an_outage_costs_the_oldest_bytes_and_bounded_memory() {
        let mut outbox = LogOutbox::default();
        let chunk = vec![b'x'; 50_000];
        for n in 0..100 {
            outbox.push("a", "stdout", n * 50_000, &chunk);
        }
        assert!(outbox.cost <= MOST_BYTES);
        let last = outbox.frames.back().unwrap();
        assert_eq!(last.end(), 100 * 50_000);
        let request = serde_json::to_vec(&outbox.batch()).unwrap();
        assert!(
            !outbox.batch().frames.is_empty() && request.len() < crate::wire::limits::MAX_LOGS_BODY_BYTES
        );
    }
}
