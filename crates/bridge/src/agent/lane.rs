//! One kind of call: at most one at a time, with its own back-off, so that a call that fails alone does not silence the others.

use crate::moment::Moment;
use crate::wire::Refusal;

use super::backoff::{Backoff, Jitter};

/// The kinds of calls that run side by side.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Lane {
    Attach,
    Stream,
    Heartbeat,
    Events,
    Logs,
    Results,
    Fatal,
}

/// Why a call came to nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// Nobody answered.
    Link,
    /// The server said no and why.
    Refused(Refusal),
    /// Some other status.
    Status(u16),
    /// An answer that makes no sense, or one that accepted nothing.
    Useless,
}

/// State of one lane.
#[derive(Debug, Clone, Default)]
pub(super) struct LaneState {
    pub busy: bool,
    not_before: Moment,
    backoff: Backoff,
    link_down: bool,
}

impl Lane {
    pub(super) const ALL: [Lane; 7] =
        [Lane::Attach, Lane::Stream, Lane::Heartbeat, Lane::Events, Lane::Logs, Lane::Results, Lane::Fatal];
}

impl LaneState {
    /// When the next call may start that is wanted from `wanted` on; never while one is under way.
    pub fn ready_at(&self, wanted: Moment) -> Option<Moment> {
        (!self.busy).then(|| self.not_before.max(wanted))
    }

    pub fn failed(&mut self, failure: &Failure, now: Moment, jitter: &mut Jitter) {
        self.not_before = now.after(self.backoff.next(jitter));
        self.link_down = *failure == Failure::Link;
    }

    pub fn succeeded(&mut self) {
        self.backoff.reset();
        self.not_before = Moment::default();
        self.link_down = false;
    }

    /// Another lane got through: what waits only because nobody answered need not wait longer.
    pub fn link_is_up(&mut self) {
        if std::mem::take(&mut self.link_down) {
            self.not_before = Moment::default();
        }
    }
}
