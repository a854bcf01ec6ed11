//! Which sandboxes are being renewed, and which were a moment ago.
//!
//! Pure: time is given. Holds at most [`CAPACITY`] sandboxes; the ones not asked about for longest are forgotten first, which costs at
//! most a renewal too many.

use std::{collections::HashMap, time::Duration};

use sandglass_sandbox::{SandboxId, Timestamp};
use tokio::time::Instant;

const CAPACITY: usize = 8192;
/// A failed attempt is not repeated before this, so that a runtime that is away is not asked for every request.
const AFTER_FAILURE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    UnderWay,
    Failed(Instant),
    Renewed { at: Instant, wall: Timestamp },
}

#[derive(Debug, Clone, Copy)]
struct Note {
    phase: Phase,
    /// Grows with every use of the book.
    touched: u64,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// It lives as long as it should; by the wall clock since.
    Renewed(Timestamp),
    Failed,
    /// There is nothing to come back to.
    Forget,
}

#[derive(Debug, Default)]
pub(super) struct Book {
    notes: HashMap<SandboxId, Note>,
    uses: u64,
}

impl Book {
    /// Whether an attempt may begin at all, `interval` after the last success.
    pub(super) fn allows(&mut self, id: SandboxId, now: Instant, interval: Duration) -> bool {
        self.uses += 1;
        let Some(note) = self.notes.get_mut(&id) else { return true };
        note.touched = self.uses;
        match note.phase {
            Phase::UnderWay => false,
            Phase::Failed(at) => now.duration_since(at) >= AFTER_FAILURE.min(interval),
            Phase::Renewed { at, .. } => now.duration_since(at) >= interval,
        }
    }

    /// Whether use of the sandbox at this instant was before its last renewal, which makes up for it.
    pub(super) fn covers(&self, id: SandboxId, used_at: Timestamp) -> bool {
        match self.notes.get(&id).map(|note| note.phase) {
            Some(Phase::Renewed { wall, .. }) => used_at <= wall,
            _ => false,
        }
    }

    /// Notes that an attempt begins; `false` when it must not.
    pub(super) fn begin(&mut self, id: SandboxId, now: Instant, interval: Duration) -> bool {
        if !self.allows(id, now, interval) {
            return false;
        }
        if self.notes.len() >= CAPACITY && !self.notes.contains_key(&id) {
            self.make_room();
        }
        self.notes.insert(id, Note { phase: Phase::UnderWay, touched: self.uses });
        true
    }

    /// Notes how the attempt ended.
    pub(super) fn end(&mut self, id: SandboxId, now: Instant, ended: Ended) {
        let phase = match ended {
            Ended::Renewed(wall) => Phase::Renewed { at: now, wall },
            Ended::Failed => Phase::Failed(now),
            Ended::Forget => {
                self.notes.remove(&id);
                return;
            }
        };
        if let Some(note) = self.notes.get_mut(&id) {
            note.phase = phase;
        }
    }

    /// Forgets the eighth that was not used for longest. Attempts under way are few, and they stay.
    fn make_room(&mut self) {
        let mut idle: Vec<(u64, SandboxId)> = self
            .notes
            .iter()
            .filter(|(_, note)| note.phase != Phase::UnderWay)
            .map(|(id, note)| (note.touched, *id))
            .collect();
        idle.sort_unstable_by_key(|(touched, _)| *touched);
        for (_, id) in idle.into_iter().take(CAPACITY / 8) {
            self.notes.remove(&id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MINUTE: Duration = Duration::from_secs(60);

    fn wall(ms: i64) -> Timestamp {
        Timestamp::clamped(ms)
    }

    #[tokio::test(start_paused = true)]
    async fn one_attempt_at_a_time_and_one_success_an_interval() {
        let (mut book, id, start) = (Book::default(), SandboxId::random(), Instant::now());
        assert!(book.begin(id, start, MINUTE));
        assert!(!book.begin(id, start + 10 * MINUTE, MINUTE), "it is under way");
        book.end(id, start, Ended::Renewed(wall(5)));
        assert!(!book.begin(id, start + MINUTE - Duration::from_millis(1), MINUTE));
        assert!(book.begin(SandboxId::random(), start, MINUTE), "another sandbox is another matter");
        assert!(book.begin(id, start + MINUTE, MINUTE));
    }

    #[tokio::test(start_paused = true)]
    async fn a_failure_rests_briefly_and_what_is_gone_is_forgotten() {
        let (mut book, id, start) = (Book::default(), SandboxId::random(), Instant::now());
        assert!(book.begin(id, start, MINUTE));
        book.end(id, start, Ended::Failed);
        assert!(!book.begin(id, start + AFTER_FAILURE / 2, MINUTE));
        assert!(book.begin(id, start + AFTER_FAILURE / 2, Duration::from_secs(1)), "the interval is shorter");
        book.end(id, start, Ended::Failed);
        assert!(book.begin(id, start + AFTER_FAILURE, MINUTE));
        book.end(id, start, Ended::Forget);
        assert!(book.notes.is_empty());
        book.end(id, start, Ended::Failed);
        assert!(book.notes.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_renewal_covers_what_was_before_it() {
        let (mut book, id, start) = (Book::default(), SandboxId::random(), Instant::now());
        assert!(!book.covers(id, wall(1)));
        book.begin(id, start, MINUTE);
        assert!(!book.covers(id, wall(1)));
        book.end(id, start, Ended::Renewed(wall(100)));
        assert!(book.covers(id, wall(100)) && !book.covers(id, wall(101)));
    }

    #[tokio::test(start_paused = true)]
    async fn the_least_used_are_forgotten_first() {
        let (mut book, start) = (Book::default(), Instant::now());
        let ids: Vec<SandboxId> = (0..CAPACITY).map(|_| SandboxId::random()).collect();
        for id in &ids {
            assert!(book.begin(*id, start, MINUTE));
            book.end(*id, start, Ended::Renewed(wall(1)));
        }
        // The oldest one is asked about again.
        assert!(!book.allows(ids[0], start, MINUTE));
        assert!(book.begin(SandboxId::random(), start, MINUTE));
        assert!(book.notes.len() <= CAPACITY);
        assert!(!book.allows(ids[0], start, MINUTE), "it is still known");
        assert!(book.allows(ids[1], start, MINUTE), "it is forgotten");
        assert!(!book.allows(ids[CAPACITY - 1], start, MINUTE));
    }
}
