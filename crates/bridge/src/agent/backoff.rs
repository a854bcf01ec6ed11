//! Waits between attempts: full jitter between one second and a bound that doubles up to thirty. Attempts never end.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::time::Duration;

use crate::wire::limits::{RETRY_LEAST, RETRY_MOST};

/// Random numbers that are good enough to keep agents from calling in step, and for nothing else (SplitMix64).
#[derive(Debug, Clone)]
pub struct Jitter(u64);

impl Jitter {
    pub fn seeded(seed: u64) -> Self {
        Self(seed)
    }

    /// Seeded by the system.
    pub fn random() -> Self {
        Self(RandomState::new().build_hasher().finish())
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Anywhere between the two, ends included, to the millisecond.
    fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let span = most.saturating_sub(least).as_millis() as u64 + 1;
        least + Duration::from_millis(self.next() % span)
    }
}

/// How many attempts failed in a row.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Backoff {
    failures: u32,
}

impl Backoff {
    /// The wait before the next attempt, one more having failed.
    pub fn next(&mut self, jitter: &mut Jitter) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let bound = RETRY_LEAST.saturating_mul(1 << self.failures.min(10)).min(RETRY_MOST);
        jitter.between(RETRY_LEAST, bound)
    }

    pub fn reset(&mut self) {
        self.failures = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_spread_between_a_second_and_a_bound_that_doubles() {
        let mut jitter = Jitter::seeded(7);
        let (mut longest, mut shortest) = ([Duration::ZERO; 8], [Duration::MAX; 8]);
        for _ in 0..2_000 {
            let mut backoff = Backoff::default();
            for attempt in 0..8 {
                let wait = backoff.next(&mut jitter);
                longest[attempt] = longest[attempt].max(wait);
                shortest[attempt] = shortest[attempt].min(wait);
            }
        }
        for (attempt, bound) in [2, 4, 8, 16, 30, 30, 30, 30].into_iter().enumerate() {
            let bound = Duration::from_secs(bound);
            assert!(
                longest[attempt] <= bound && longest[attempt] > bound.mul_f64(0.95),
                "{attempt}: {longest:?}"
            );
            assert!(shortest[attempt] >= RETRY_LEAST && shortest[attempt] < RETRY_LEAST * 2, "{shortest:?}");
        }
    }

    #[test]
    fn waiting_goes_on_forever() {
        let mut backoff = Backoff { failures: u32::MAX };
        assert!(backoff.next(&mut Jitter::random()) <= RETRY_MOST);
    }
}
