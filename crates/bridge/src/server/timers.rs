//! One heap for every deadline: one entry for each sandbox that waits for something.
//!
//! A deadline that moves later, as with each heartbeat, leaves its entry where it is; the entry is moved when it comes up. So a
//! heartbeat touches no heap.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::moment::Moment;

/// A slot and which of its occupants is meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct Key {
    pub index: usize,
    pub serial: u64,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(Moment, Key)>>,
}

impl Timers {
    /// Sees to it that `key` comes up at `due` at the latest. `armed` is the earliest entry that it has.
    pub fn arm(&mut self, key: Key, armed: &mut Option<Moment>, due: Option<Moment>) {
        if let Some(due) = due
            && armed.is_none_or(|at| due < at)
        {
            *armed = Some(due);
            self.heap.push(Reverse((due, key)));
        }
    }

    /// The next entry that is due, taken out. It may be stale: whoever gets it compares it with what is armed.
    pub fn pop(&mut self, now: Moment) -> Option<(Moment, Key)> {
        let Reverse((due, _)) = self.heap.peek()?;
        if *due > now {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }

    /// When to look again: no deadline is earlier.
    pub fn next(&self) -> Option<Moment> {
        self.heap.peek().map(|Reverse((due, _))| *due)
    }

    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.heap.len()
    }
}
