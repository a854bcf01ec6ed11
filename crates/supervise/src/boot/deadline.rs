//! When a step has taken too long: a time that progress puts off, and one that nothing does.

use std::time::Duration;

use crate::clock::Moment;

/// Which of the times is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Expired {
    /// Nothing was heard of it for so long.
    Silent { limit: Duration },
    /// It went on, but not for ever.
    Cap { cap: Duration },
    /// The boot as a whole has taken too long.
    Boot,
}

/// The times of one step.
#[derive(Debug, Clone, Copy)]
pub struct Deadline {
    started: Moment,
    limit: Duration,
    cap: Option<Duration>,
    /// Of the boot.
    last: Moment,
    heard: Moment,
}

impl Deadline {
    pub fn new(now: Moment, limit: Duration, cap: Option<Duration>, last: Moment) -> Self {
        Deadline { started: now, limit, cap, last, heard: now }
    }

    /// It was heard of at that moment.
    pub fn progress(&mut self, at: Moment) {
        self.heard = self.heard.max(at);
    }

    /// When to look next.
    pub fn due(&self) -> Moment {
        let by_cap = self.cap.map_or(self.last, |cap| self.started + cap);
        (self.heard + self.limit).min(by_cap).min(self.last)
    }

    pub fn expired(&self, now: Moment) -> Option<Expired> {
        if now >= self.last {
            return Some(Expired::Boot);
        }
        if let Some(cap) = self.cap.filter(|cap| now.since(self.started) >= *cap) {
            return Some(Expired::Cap { cap });
        }
        (now.since(self.heard) >= self.limit).then_some(Expired::Silent { limit: self.limit })
    }
}

impl std::fmt::Display for Expired {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Expired::Silent { limit } => write!(f, "no progress for {} s", limit.as_secs()),
            Expired::Cap { cap } => write!(f, "not done after {} s", cap.as_secs()),
            Expired::Boot => f.write_str("not done when the time of the whole boot was over"),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::since_start(Duration::from_secs(seconds))
    }

    #[test]
    fn progress_puts_off_the_silence_and_nothing_else() {
        let second = Duration::from_secs;
        let mut deadline = Deadline::new(at(10), second(5), Some(second(20)), at(100));
        assert_eq!((deadline.due(), deadline.expired(at(14))), (at(15), None));
        deadline.progress(at(14));
        deadline.progress(at(12));
        assert_eq!((deadline.due(), deadline.expired(at(15))), (at(19), None));
        assert_eq!(deadline.expired(at(19)), Some(Expired::Silent { limit: second(5) }));
        deadline.progress(at(29));
        assert_eq!(
            (deadline.due(), deadline.expired(at(30))),
            (at(30), Some(Expired::Cap { cap: second(20) }))
        );
        let short = Deadline::new(at(10), second(5), None, at(12));
        assert_eq!((short.due(), short.expired(at(12))), (at(12), Some(Expired::Boot)));
    }

    proptest! {
        /// It is over exactly when it is due, and never later than the cap and the boot allow.
        #[test]
        fn due_is_when_it_expires(limit in 1u64..50, cap in proptest::option::of(1u64..200), last in 1u64..300, heard in proptest::collection::vec(0u64..100, 0..20)) {
            let mut deadline = Deadline::new(at(0), Duration::from_secs(limit), cap.map(Duration::from_secs), at(last));
            let mut now = 0;
            for pause in heard {
                let next = now + pause;
                if deadline.expired(at(next)).is_some() {
                    break;
                }
                now = next;
                deadline.progress(at(now));
            }
            let due = deadline.due();
            prop_assert!(deadline.expired(due).is_some());
            prop_assert!(due.elapsed().is_zero() || deadline.expired(Moment::since_start(due.elapsed() - Duration::from_nanos(1))).is_none());
            prop_assert!(due <= at(last.min(cap.unwrap_or(last)).min(now + limit)));
        }
    }
}
