//! Follows the bytes of an HTTP/1 connection and passes on only heads that are whole and have one meaning.
//!
//! Pure: knows neither sockets nor time.

use bytes::BytesMut;

use super::chunks::Chunks;
use super::head::{self, Body};
use super::malformed::Malformed;
use super::settings::Limits;

/// What comes next on the connection.
#[derive(Debug)]
enum Next {
    Head,
    Sized(u64),
    Chunked(Chunks),
    /// The request asked for an upgrade: what follows is HTTP only if that is not granted.
    Undecided,
    Tunnel,
}

/// What is to be done before more can be passed on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Want {
    /// The next head, of which nothing has come yet.
    Head,
    /// The rest of a head.
    RestOfHead,
    Body,
    /// The answer to a request for an upgrade.
    Decision,
    /// Whatever comes; it is nobody's business here.
    Anything,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Inspector {
    next: Next,
    upgrade: bool,
    /// Bytes of the unfinished head that were looked at, and where its current line starts.
    looked_at: usize,
    line: usize,
    max_bytes: usize,
    max_fields: usize,
}

impl Inspector {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            next: Next::Head,
            upgrade: false,
            looked_at: 0,
            line: 0,
            max_bytes: limits.head_bytes,
            max_fields: limits.head_fields,
        }
    }

    /// For connections that are not HTTP/1.
    pub(super) fn blind(limits: &Limits) -> Self {
        Self { next: Next::Tunnel, ..Self::new(limits) }
    }

    pub(super) fn want(&self, unread: &BytesMut) -> Want {
        match self.next {
            Next::Head if unread.is_empty() => Want::Head,
            Next::Head => Want::RestOfHead,
            Next::Sized(_) | Next::Chunked(_) => Want::Body,
            Next::Undecided => Want::Decision,
            Next::Tunnel => Want::Anything,
        }
    }

    /// How many bytes need not be looked at.
    pub(super) fn unwatched(&self) -> usize {
        match self.next {
            Next::Sized(left) => usize::try_from(left).unwrap_or(usize::MAX),
            Next::Tunnel => usize::MAX,
            _ => 0,
        }
    }

    /// So many of them went by.
    pub(super) fn went_by(&mut self, bytes: usize) {
        if let Next::Sized(left) = &mut self.next {
            *left = left.saturating_sub(bytes as u64);
            if *left == 0 {
                self.ended();
            }
        }
    }

    /// The answer to the request for an upgrade.
    pub(super) fn decide(&mut self, upgraded: bool) {
        self.next = if upgraded { Next::Tunnel } else { Next::Head };
    }

    /// Moves what is in order from `unread` to `passed`.
    pub(super) fn pass(&mut self, unread: &mut BytesMut, passed: &mut BytesMut) -> Result<(), Malformed> {
        while !unread.is_empty() {
            match &mut self.next {
                Next::Head => {
                    if !self.pass_head(unread, passed)? {
                        return Ok(());
                    }
                }
                Next::Sized(left) => {
                    let here = usize::try_from(*left).unwrap_or(usize::MAX).min(unread.len());
                    passed.unsplit(unread.split_to(here));
                    self.went_by(here);
                }
                Next::Chunked(chunks) => {
                    let (here, ended) = chunks.advance(unread)?;
                    passed.unsplit(unread.split_to(here));
                    if ended {
                        self.ended();
                    }
                }
                Next::Undecided => return Ok(()),
                Next::Tunnel => passed.unsplit(unread.split()),
            }
        }
        Ok(())
    }

    fn ended(&mut self) {
        self.next = if self.upgrade { Next::Undecided } else { Next::Head };
    }

    /// False when the head is not whole yet.
    fn pass_head(&mut self, unread: &mut BytesMut, passed: &mut BytesMut) -> Result<bool, Malformed> {
        let Some(end) = self.end_of_head(unread)? else {
            return if unread.len() >= self.max_bytes { Err(too_large(unread)) } else { Ok(false) };
        };
        if end > self.max_bytes {
            return Err(too_large(unread));
        }
        (self.looked_at, self.line) = (0, 0);
        let head = unread.split_to(end);
        // An empty line before a request is left over from the one before, as old clients send it.
        if head.as_ref() == b"\r\n" {
            return Ok(true);
        }
        let framing = head::read(&head, self.max_fields)?;
        passed.unsplit(head);
        self.upgrade = framing.upgrade;
        match framing.body {
            Body::Sized(0) => self.ended(),
            Body::Sized(length) => self.next = Next::Sized(length),
            Body::Chunked => self.next = Next::Chunked(Chunks::new()),
        }
        Ok(true)
    }

    /// Where the first empty line ends.
    fn end_of_head(&mut self, unread: &[u8]) -> Result<Option<usize>, Malformed> {
        while let Some(found) = unread[self.looked_at..].iter().position(|b| *b == b'\n') {
            let at = self.looked_at + found;
            let Some(cr) = at.checked_sub(1).filter(|cr| *cr >= self.line && unread[*cr] == b'\r') else {
                return Err(Malformed::LineEnding);
            };
            let empty = cr == self.line;
            (self.looked_at, self.line) = (at + 1, at + 1);
            if empty {
                return Ok(Some(at + 1));
            }
        }
        self.looked_at = unread.len();
        Ok(None)
    }
}

/// Which part of a head is to blame.
fn too_large(unread: &[u8]) -> Malformed {
    let first_line = unread.iter().position(|b| *b == b'\n').unwrap_or(unread.len());
    if first_line > head::MAX_TARGET { Malformed::TargetTooLong } else { Malformed::HeadTooLarge }
}
