//! The beginning of what a server sends, put together as its client will see it.

use super::packet::Segment;
use super::tls::{self, Reply};

/// As much of it as tells whether a TLS server asks for another hello.
#[derive(Debug, Default)]
pub(super) struct Server {
    start: u32,
    /// Without gaps.
    bytes: Vec<u8>,
}

impl Server {
    /// With the sequence number of its first byte.
    pub(super) fn new(start: u32) -> Self {
        Self { start, bytes: Vec::new() }
    }

    /// What the bytes so far are.
    pub(super) fn reply(&self) -> Reply {
        tls::reply(&self.bytes)
    }

    /// Whether the bytes that a segment carries are known now.
    pub(super) fn takes(&mut self, segment: &Segment<'_>) -> bool {
        let room = tls::ANSWER - self.bytes.len();
        let offset = segment.sequence.wrapping_sub(self.start) as i32;
        if room == 0 || segment.bytes.is_empty() {
            return true;
        }
        // What was before the beginning is none of it: a probe whether somebody is there.
        let Ok(offset) = usize::try_from(offset) else { return true };
        if offset > self.bytes.len() {
            return false;
        }
        let new = segment.bytes.get(self.bytes.len() - offset..).unwrap_or_default();
        self.bytes.extend_from_slice(&new[..new.len().min(room)]);
        true
    }
}
