//! What happened in this boot and is not yet known to the server.
//!
//! Events get consecutive numbers and stay until they are acknowledged. Over its budget the ring drops, in this order: progress
//! that newer progress of the same key replaces, output from the oldest on, the rest of progress. [State](Class::State) is never
//! dropped, even if it alone is larger than the budget. A hole in the numbers *is* the record of what was dropped: when events are
//! read, every hole becomes one [`Gap`] of exactly the missing numbers, so the count cannot be wrong.
//!
//! Events are on disk when [`Ring::push`] returns, so they survive the agent; memory holds an index. When the disk fails, events
//! are kept in memory instead. The directory belongs to one process at a time.

mod lines;
mod record;
mod rewrite;
mod segments;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::path::Path;

use jiff::Timestamp;
use serde_json::value::{RawValue, to_raw_value};

use crate::wire::limits::{MAX_EVENT_BYTES, MAX_EVENTS, MAX_EVENTS_BYTES, RING_BYTES};
use crate::wire::{BootId, Class, Event, GAP, Gap};

use lines::{one_line, readable, write_gap};
use segments::{Place, Segments};

/// Longest key of progress, in bytes.
const MAX_KEY_BYTES: usize = 256;
/// Bytes of a [`Gap`] as a line, at most.
const GAP_LINE_BYTES: usize = 256;

/// Events of one boot.
pub struct Ring {
    boot: BootId,
    segments: Segments,
    budget: u64,
    kept: BTreeMap<u64, Kept>,
    /// What may go, first what matters least.
    droppable: BTreeSet<(Rank, u64)>,
    newest_progress: HashMap<String, u64>,
    bytes: u64,
    acked: u64,
    next: u64,
    /// The next number when the ring was opened, until the server said where it stands.
    unreconciled: Option<u64>,
    /// Whether something that was pushed since opening has been read.
    read_fresh: bool,
    dropped: u64,
    last_time: Timestamp,
    disk_failed: bool,
}

/// Something that happened, before it has a number.
#[derive(Debug, Clone)]
pub struct Draft {
    pub class: Class,
    pub time: Timestamp,
    pub kind: String,
    /// For progress: what it is the progress of. Later progress of the same key may replace it.
    pub key: Option<String>,
    pub data: Box<RawValue>,
}

/// How a ring was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opened {
    /// Unacknowledged events of an earlier run.
    pub events: u64,
    /// Bytes at ends of files that were no whole record.
    pub cut_bytes: u64,
}

/// Events to send, as newline-delimited JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    pub body: Vec<u8>,
    pub events: usize,
    /// Number of the last event in it.
    pub last_seq: u64,
    /// Whether there is more behind it.
    pub more: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingStatus {
    pub acked_seq: u64,
    /// Number of the newest event, 0 before the first.
    pub last_seq: u64,
    pub events: u64,
    pub bytes: u64,
    /// Events dropped by this process.
    pub dropped: u64,
    /// The disk failed: some events are in memory only.
    pub disk_failed: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum PushError {
    #[error("an event of type {kind} has {bytes} bytes, more than {MAX_EVENT_BYTES}")]
    TooLarge { kind: String, bytes: usize },
    #[error(
        "the type of an event is 1 to 128 bytes and not \"{GAP}\", and a key at most {MAX_KEY_BYTES} bytes"
    )]
    Name,
    #[error("an event could not be written as JSON")]
    Json(#[from] serde_json::Error),
}

struct Kept {
    class: Class,
    key: Option<String>,
    body: Body,
    rank: Option<Rank>,
}

enum Body {
    Disk(Place),
    Memory(Vec<u8>),
}

/// Order in which events are dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    ReplacedProgress,
    Output,
    Progress,
}

impl Draft {
    /// A draft whose data is `data` as JSON.
    pub fn new(
        class: Class,
        time: Timestamp,
        kind: &str,
        data: &impl serde::Serialize,
    ) -> serde_json::Result<Self> {
        Ok(Self { class, time, kind: kind.to_owned(), key: None, data: to_raw_value(data)? })
    }

    /// The same as progress of `key`.
    #[must_use]
    pub fn keyed(mut self, key: &str) -> Self {
        self.key = Some(key.to_owned());
        self
    }
}

impl Body {
    fn len(&self) -> u64 {
        match self {
            Body::Disk(place) => u64::from(place.length),
            Body::Memory(json) => json.len() as u64,
        }
    }
}

impl Ring {
    /// Opens the ring of `boot` in `dir`, with what an earlier run of this boot left. What another boot left is removed: ask
    /// [`Ring::boot_of`] first to go on with it.
    pub fn open(dir: &Path, boot: BootId) -> io::Result<(Self, Opened)> {
        Self::with_budget(dir, boot, RING_BYTES)
    }

    /// A ring that keeps nothing over a restart, for a box without a place to write.
    pub fn in_memory(boot: BootId) -> Self {
        let mut ring = Self::empty(Segments::nowhere(&boot), boot, RING_BYTES, 0, 1);
        ring.disk_failed = true;
        ring
    }

    /// As [`Ring::open`], with another budget, in bytes of events.
    pub fn with_budget(dir: &Path, boot: BootId, budget: u64) -> io::Result<(Self, Opened)> {
        let (segments, contents) = Segments::open(dir, &boot)?;
        let mut ring = Self::empty(segments, boot, budget, contents.acked, contents.next);
        for found in contents.events {
            if found.seq > ring.acked {
                ring.keep(found.seq, found.class, found.key, Body::Disk(found.place));
            } else {
                ring.segments.release(found.place.segment);
            }
        }
        let opened = Opened { events: ring.kept.len() as u64, cut_bytes: contents.cut };
        ring.last_time = ring.newest_time().unwrap_or(Timestamp::UNIX_EPOCH);
        ring.relieve();
        Ok((ring, opened))
    }

    fn empty(segments: Segments, boot: BootId, budget: u64, acked: u64, next: u64) -> Self {
        Self {
            boot,
            segments,
            budget,
            kept: BTreeMap::new(),
            droppable: BTreeSet::new(),
            newest_progress: HashMap::new(),
            bytes: 0,
            acked,
            next,
            unreconciled: Some(next),
            read_fresh: false,
            dropped: 0,
            last_time: Timestamp::UNIX_EPOCH,
            disk_failed: false,
        }
    }

    /// The boot whose ring `dir` holds, if any.
    pub fn boot_of(dir: &Path) -> io::Result<Option<BootId>> {
        segments::boot_of(dir)
    }

    pub fn boot(&self) -> &BootId {
        &self.boot
    }

    /// Gives an event its number and keeps it. Never fails for want of room or of a disk.
    pub fn push(&mut self, draft: Draft) -> Result<u64, PushError> {
        let key = draft.key.filter(|key| draft.class == Class::Progress && !key.is_empty());
        let name_ok = (1..=128).contains(&draft.kind.len()) && draft.kind != GAP;
        if !name_ok || key.as_ref().is_some_and(|key| key.len() > MAX_KEY_BYTES) {
            return Err(PushError::Name);
        }
        let seq = self.next;
        let event = Event { seq, time: draft.time, kind: draft.kind, data: draft.data };
        let json = one_line(&event)?;
        if json.len() > MAX_EVENT_BYTES {
            return Err(PushError::TooLarge { kind: event.kind, bytes: json.len() });
        }
        self.next += 1;
        self.last_time = event.time;
        let body = match self.segments.append(seq, draft.class, key.as_deref(), &json, self.acked) {
            Ok(place) => Body::Disk(place),
            Err(_) => {
                self.disk_failed = true;
                Body::Memory(json)
            }
        };
        self.keep(seq, draft.class, key, body);
        self.relieve();
        Ok(seq)
    }

    /// The server has everything up to `seq`.
    pub fn ack(&mut self, seq: u64) {
        self.unreconciled = None;
        let seq = seq.min(self.next - 1);
        while let Some((&first, _)) = self.kept.first_key_value().filter(|(first, _)| **first <= seq) {
            self.forget(first);
        }
        self.acked = self.acked.max(seq);
    }

    /// The server said at an attachment where it stands. Three things can differ from what the ring believes: the server is
    /// ahead (an answer was lost), behind (it lost what it had: a gap will say so), or ahead of all that the ring ever wrote
    /// (the ring lost its newest events): then what was pushed since opening, and never sent, moves behind what the server has.
    pub fn reconcile(&mut self, server: u64) {
        if let Some(floor) = self.unreconciled.take()
            && server >= floor
            && !self.read_fresh
        {
            self.move_up(floor, server + 1 - floor);
        }
        self.next = self.next.max(server + 1);
        self.ack(server);
        self.acked = server;
    }

    /// The events after `after`, gaps included, within the bounds of one request; `None` when there are none.
    pub fn batch(&mut self, after: u64) -> Option<Batch> {
        self.batch_of(after, MAX_EVENTS, MAX_EVENTS_BYTES)
    }

    /// The same within other bounds. An event larger than `most_bytes` goes alone.
    pub fn batch_of(&mut self, after: u64, most_events: usize, most_bytes: usize) -> Option<Batch> {
        let mut body = Vec::new();
        let (mut events, mut last) = (0, after);
        let mut unreadable = Vec::new();
        for (&seq, kept) in self.kept.range(after + 1..) {
            let hole = seq > last + 1;
            let size = kept.body.len() as usize + 1 + if hole { GAP_LINE_BYTES } else { 0 };
            if events > 0 && (events + usize::from(hole) >= most_events || body.len() + size > most_bytes) {
                break;
            }
            let json = match &kept.body {
                Body::Memory(json) => Ok(json.clone()),
                Body::Disk(place) => self.segments.read(*place).and_then(|json| readable(seq, json)),
            };
            let Ok(json) = json else {
                unreadable.push(seq);
                continue;
            };
            if hole {
                write_gap(&mut body, Gap::of(last + 1, seq - 1), self.last_time);
                events += 1;
                last = seq - 1;
                if events >= most_events {
                    break;
                }
            }
            body.extend_from_slice(&json);
            body.push(b'\n');
            events += 1;
            last = seq;
        }
        for seq in unreadable {
            self.dropped += 1;
            self.forget(seq);
        }
        if self.kept.range(last + 1..).next().is_none() && last + 1 < self.next && events < most_events {
            write_gap(&mut body, Gap::of(last + 1, self.next - 1), self.last_time);
            events += 1;
            last = self.next - 1;
        }
        self.read_fresh |= self.unreconciled.is_some_and(|floor| last >= floor);
        (events > 0).then(|| Batch { body, events, last_seq: last, more: last + 1 < self.next })
    }

    pub fn status(&self) -> RingStatus {
        RingStatus {
            acked_seq: self.acked,
            last_seq: self.next - 1,
            events: self.kept.len() as u64,
            bytes: self.bytes,
            dropped: self.dropped,
            disk_failed: self.disk_failed,
        }
    }

    /// Whether there is something that the server does not have.
    pub fn has_unacked(&self) -> bool {
        self.acked + 1 < self.next
    }

    /// Whether the server's position has yet to be heard since the ring was opened.
    pub fn is_unreconciled(&self) -> bool {
        self.unreconciled.is_some()
    }

    fn newest_time(&self) -> Option<Timestamp> {
        let (_, newest) = self.kept.last_key_value()?;
        let Body::Disk(place) = newest.body else { return None };
        let event: Event = serde_json::from_slice(&self.segments.read(place).ok()?).ok()?;
        Some(event.time)
    }

    fn keep(&mut self, seq: u64, class: Class, key: Option<String>, body: Body) {
        // Found twice: the copy that was read later counts.
        if self.kept.contains_key(&seq) {
            self.forget(seq);
        }
        let rank = match class {
            Class::State => None,
            Class::Output => Some(Rank::Output),
            Class::Progress => Some(Rank::Progress),
        };
        if let Some(key) = &key {
            let older = self.newest_progress.insert(key.clone(), seq);
            if let Some(older) = older {
                self.rerank(older, Rank::ReplacedProgress);
            }
        }
        self.droppable.extend(rank.map(|rank| (rank, seq)));
        self.bytes += body.len();
        self.kept.insert(seq, Kept { class, key, body, rank });
    }

    fn rerank(&mut self, seq: u64, rank: Rank) {
        let Some(kept) = self.kept.get_mut(&seq) else { return };
        if let Some(before) = kept.rank.replace(rank) {
            self.droppable.remove(&(before, seq));
        }
        self.droppable.insert((rank, seq));
    }

    fn forget(&mut self, seq: u64) {
        let Some(kept) = self.kept.remove(&seq) else { return };
        self.bytes -= kept.body.len();
        if let Some(rank) = kept.rank {
            self.droppable.remove(&(rank, seq));
        }
        if let Some(key) = &kept.key
            && self.newest_progress.get(key) == Some(&seq)
        {
            self.newest_progress.remove(key);
        }
        if let Body::Disk(place) = kept.body {
            self.segments.release(place.segment);
        }
    }

    /// Drops what may go until the rest fits, and files that hold mostly what is gone.
    fn relieve(&mut self) {
        while self.bytes > self.budget
            && let Some((_, seq)) = self.droppable.first().copied()
        {
            self.forget(seq);
            self.dropped += 1;
        }
        if self.segments.bytes() > 2 * self.budget.max(self.bytes) + self.kept.len() as u64 * 64 {
            // A ring that cannot be made smaller now is made smaller later.
            let _ = self.rewrite(0, 0);
        }
    }
}

#[cfg(test)]
mod tests;
