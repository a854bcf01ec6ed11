//! How often and how soon a service is started again.
//!
//! Invariant: between two healthy periods there are at most as many restarts as the budget has, and no wait is longer than the cap.

use std::time::Duration;

use crate::clock::Moment;

/// The numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    /// Before the first restart; each further one waits twice as long.
    pub base: Duration,
    pub cap: Duration,
    /// By how much a wait is longer or shorter at random, in percent.
    pub jitter_percent: u32,
    /// Restarts before a service is given up.
    pub budget: u32,
    /// Ready for so long, the budget is whole again.
    pub healthy: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Backoff {
            base: Duration::from_secs(1),
            cap: Duration::from_secs(60),
            jitter_percent: 20,
            budget: 5,
            healthy: Duration::from_secs(300),
        }
    }
}

impl Backoff {
    /// The wait before a restart, by how many came before it; any `draw` gives a wait within the jitter and the cap.
    pub fn delay(&self, before: u32, draw: u64) -> Duration {
        let doubled = 2_u32.checked_pow(before).and_then(|factor| self.base.checked_mul(factor));
        let plain = doubled.map_or(self.cap, |plain| plain.min(self.cap));
        let percent = u64::from(self.jitter_percent.min(100));
        // Per thousand, from `-percent` to `+percent`.
        let shift = 1000 - percent * 10 + draw % (percent * 20 + 1);
        let shifted = plain.as_nanos() * u128::from(shift) / 1000;
        Duration::from_nanos(u64::try_from(shifted).unwrap_or(u64::MAX)).min(self.cap)
    }
}

/// What is to be done about a service that was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Retry { after: Duration },
    GiveUp,
}

/// The restarts of one service.
#[derive(Debug, Clone, Copy)]
pub struct Restarts {
    backoff: Backoff,
    spent: u32,
    ready_since: Option<Moment>,
}

impl Restarts {
    pub fn new(backoff: Backoff) -> Self {
        Restarts { backoff, spent: 0, ready_since: None }
    }

    /// It answers.
    pub fn ready(&mut self, now: Moment) {
        self.ready_since = Some(now);
    }

    /// It is gone: whether it gets another start.
    pub fn lost(&mut self, now: Moment, draw: u64) -> Verdict {
        self.spent = self.spent_at(now);
        self.ready_since = None;
        if self.spent >= self.backoff.budget {
            return Verdict::GiveUp;
        }
        let after = self.backoff.delay(self.spent, draw);
        self.spent += 1;
        Verdict::Retry { after }
    }

    /// Somebody asked for it: the whole budget again.
    pub fn restore(&mut self) {
        self.spent = 0;
        self.ready_since = None;
    }

    /// How many restarts are left.
    pub fn left(&self, now: Moment) -> u32 {
        self.backoff.budget.saturating_sub(self.spent_at(now))
    }

    fn spent_at(&self, now: Moment) -> u32 {
        match self.ready_since {
            Some(since) if now.since(since) >= self.backoff.healthy => 0,
            _ => self.spent,
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

    /// The draw that shifts nothing.
    const PLAIN: u64 = 200;

    #[test]
    fn waits_double_and_then_it_is_given_up() {
        let mut restarts = Restarts::new(Backoff::default());
        let waits: Vec<_> = (0..6).map(|_| restarts.lost(at(0), PLAIN)).collect();
        let retry = |seconds| Verdict::Retry { after: Duration::from_secs(seconds) };
        assert_eq!(waits, [retry(1), retry(2), retry(4), retry(8), retry(16), Verdict::GiveUp]);
        assert_eq!(Backoff::default().delay(30, PLAIN), Duration::from_secs(60));
        assert_eq!(Backoff::default().delay(40, 400), Duration::from_secs(60));
        assert_eq!(Backoff::default().delay(0, 0), Duration::from_millis(800));
        assert_eq!(Backoff::default().delay(0, 400), Duration::from_millis(1200));
        restarts.restore();
        assert_eq!(restarts.lost(at(0), PLAIN), retry(1));
    }

    #[test]
    fn five_healthy_minutes_restore_the_budget() {
        let mut restarts = Restarts::new(Backoff::default());
        for _ in 0..5 {
            restarts.lost(at(0), PLAIN);
        }
        restarts.ready(at(10));
        assert_eq!((restarts.left(at(309)), restarts.left(at(310))), (0, 5));
        let mut late = restarts;
        assert_eq!(restarts.lost(at(309), PLAIN), Verdict::GiveUp);
        assert_eq!(late.lost(at(310), PLAIN), Verdict::Retry { after: Duration::from_secs(1) });
    }

    proptest! {
        #[test]
        fn the_jitter_stays_within_its_bounds(before in 0u32..80, draw: u64) {
            let backoff = Backoff::default();
            let wait = backoff.delay(before, draw);
            let plain = Duration::from_secs(2_u64.checked_pow(before).unwrap_or(60).min(60));
            prop_assert!(wait >= plain * 4 / 5 && wait <= (plain * 6 / 5).min(backoff.cap));
        }

        /// However it flaps, no six restarts come without five healthy minutes among them.
        #[test]
        fn the_budget_holds(lives in proptest::collection::vec((0u64..400, 0u64..400, any::<u64>()), 1..60)) {
            let mut restarts = Restarts::new(Backoff::default());
            let mut now = 0;
            let mut in_a_row = 0;
            for (starting, ready, draw) in lives {
                now += starting;
                restarts.ready(at(now));
                now += ready;
                if ready >= 300 {
                    in_a_row = 0;
                }
                let left = restarts.left(at(now));
                prop_assert_eq!(left, 5 - in_a_row);
                match restarts.lost(at(now), draw) {
                    Verdict::Retry { after } => {
                        in_a_row += 1;
                        prop_assert!(in_a_row <= 5);
                        now += after.as_secs() + 1;
                    }
                    Verdict::GiveUp => {
                        prop_assert_eq!(in_a_row, 5);
                        restarts.restore();
                        in_a_row = 0;
                    }
                }
            }
        }
    }
}
