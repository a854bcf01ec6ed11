//! The beginning of what a server sends, put together as its client will see it.

use super::packet::Segment;
use super::postgres;
use super::tls::{self, Reply};

/// As much of it as tells whether a TLS server asks for another hello.
#[derive(Debug, Default)]
pub(super) struct Server {
    start: u32,
    /// Without gaps.
    bytes: Vec<u8>,
    /// Of them, those that answer questions before TLS.
    answers: usize,
}

impl Server {
    /// With the sequence number of its first byte.
    pub(super) fn new(start: u32) -> Self {
        Self { start, bytes: Vec::new(), answers: 0 }
    }

    /// What the bytes so far are.
    pub(super) fn reply(&self) -> Reply {
        tls::reply(self.bytes.get(self.answers..).unwrap_or_default())
    }

    /// It has so many questions to answer, with a byte each, before it says anything else; [`postgres::MOST`] at most.
    ///
    /// [`postgres::MOST`]: super::postgres::MOST
    pub(super) fn answers(&mut self, questions: usize) {
        self.answers = questions;
    }

    /// Whether there has been a byte that its client takes for the first one.
    pub(super) fn has_spoken(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// Whether the bytes that a segment carries are known now.
    pub(super) fn takes(&mut self, segment: &Segment<'_>) -> bool {
        let room = tls::ANSWER + postgres::MOST - self.bytes.len();
        let offset = segment.sequence.wrapping_sub(self.start) as i32;
        // What was before the beginning is none of it: a probe whether somebody is there.
        let before = usize::try_from(offset.min(0).unsigned_abs()).unwrap_or(usize::MAX);
        let bytes = segment.bytes.get(before..).unwrap_or_default();
        if room == 0 || bytes.is_empty() {
            return true;
        }
        let offset = usize::try_from(offset).unwrap_or(0);
        if offset > self.bytes.len() {
            return false;
        }
        let new = bytes.get(self.bytes.len() - offset..).unwrap_or_default();
        self.bytes.extend_from_slice(&new[..new.len().min(room)]);
        true
    }
}
