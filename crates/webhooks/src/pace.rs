//! When a delivery is tried again, and when no more. Pure.

use std::time::Duration;

use sandglass_sandbox::Timestamp;

use crate::{
    ports::{SendError, Sent},
    record::{Attempt, Delivery, DeliveryState},
};

/// Attempts that a delivery remembers.
const REMEMBERED: usize = 10;
/// Characters of an error.
const ERROR: usize = 300;

/// The numbers of the retries.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    /// Pause after the first failure; doubles with each.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
    /// From the first attempt until a delivery is dead.
    pub give_up_after: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            first: Duration::from_secs(1),
            longest: Duration::from_secs(300),
            give_up_after: Duration::from_secs(24 * 3600),
        }
    }
}

impl Pace {
    /// The pause after this many failed attempts, a fifth more or less. `chance` is from 0 to 1.
    pub fn pause(&self, attempts: u32, chance: f64) -> Duration {
        let doubled =
            self.first.saturating_mul(1_u32.checked_shl(attempts.saturating_sub(1)).unwrap_or(u32::MAX));
        doubled.min(self.longest).mul_f64(0.8 + 0.4 * chance.clamp(0.0, 1.0)).min(self.longest)
    }

    /// The delivery after an attempt that began at `at` and ended at `now`.
    pub fn after(
        &self,
        delivery: &Delivery,
        (at, now): (Timestamp, Timestamp),
        outcome: &Result<Sent, SendError>,
        chance: f64,
    ) -> Delivery {
        let mut next = delivery.clone();
        next.attempts = delivery.attempts.saturating_add(1);
        let began = *next.first_attempt_at.get_or_insert(at);
        let error = match outcome {
            Ok(sent) if sent.is_success() => None,
            Ok(sent) => Some(format!("the receiver answered {}", sent.status)),
            Err(error) => Some(error.to_string().chars().take(ERROR).collect()),
        };
        let delivered = error.is_none();
        let duration_ms = u64::try_from(at.until(now).as_millis()).unwrap_or(u64::MAX);
        next.last.push(Attempt {
            at,
            status: outcome.as_ref().ok().map(|sent| sent.status),
            error,
            duration_ms,
        });
        let forgotten = next.last.len().saturating_sub(REMEMBERED);
        next.last.drain(..forgotten);
        if delivered {
            next.finish(DeliveryState::Delivered, now);
            return next;
        }
        let end = began.checked_add(self.give_up_after).unwrap_or(now);
        if now >= end {
            next.finish(DeliveryState::Dead, now);
            return next;
        }
        let asked = outcome.as_ref().ok().and_then(|sent| sent.retry_after).unwrap_or_default();
        let pause = self.pause(next.attempts, chance).max(asked.min(self.longest));
        // The last attempt is at the end itself.
        next.next_at = now.checked_add(pause).unwrap_or(end).min(end);
        next
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::clamped(ms)
    }

    fn answered(status: u16) -> Result<Sent, SendError> {
        Ok(Sent { status, retry_after: None })
    }

    fn fresh() -> Delivery {
        Delivery::new(1, "msg_1".into(), "sandbox:a".into(), "sandbox.created".into(), "{}".into(), at(0))
    }

    #[test]
    fn pauses_double_from_a_second_to_five_minutes() {
        let pace = Pace::default();
        let middle = |n| pace.pause(n, 0.5).as_secs();
        let seen: Vec<_> = (1..=11).map(middle).collect();
        assert_eq!(seen, [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]);
        assert_eq!(pace.pause(1, 0.0), Duration::from_millis(800));
        assert_eq!(pace.pause(u32::MAX, 1.0), Duration::from_secs(300));
    }

    #[test]
    fn a_success_ends_and_a_failure_waits() {
        let pace = Pace::default();
        let done = pace.after(&fresh(), (at(10), at(25)), &answered(204), 0.5);
        assert_eq!((done.state, done.attempts, done.body.as_str()), (DeliveryState::Delivered, 1, ""));
        assert_eq!((done.last[0].status, done.last[0].duration_ms), (Some(204), 15));
        for status in [199, 301, 400, 500] {
            let again = pace.after(&fresh(), (at(10), at(20)), &answered(status), 0.5);
            assert_eq!((again.state, again.next_at), (DeliveryState::Pending, at(1020)), "{status}");
        }
        let slow = Ok(Sent { status: 503, retry_after: Some(Duration::from_secs(9000)) });
        assert_eq!(pace.after(&fresh(), (at(0), at(0)), &slow, 0.5).next_at, at(300_000));
        let refused = Err(SendError::Refused("an address".into()));
        let again = pace.after(&fresh(), (at(0), at(0)), &refused, 0.5);
        assert!(
            again.last[0].status.is_none() && again.last[0].error.as_ref().unwrap().contains("an address")
        );
    }

    proptest! {
        #[test]
        fn every_delivery_ends(chance in 0.0..1.0_f64, took in 0_i64..10_000) {
            let pace = Pace::default();
            let (mut delivery, mut now, mut count) = (fresh(), 0, 0);
            while delivery.state == DeliveryState::Pending {
                now = delivery.next_at.as_millis().max(now);
                delivery = pace.after(&delivery, (at(now), at(now + took)), &answered(500), chance);
                count += 1;
                prop_assert!(delivery.last.len() <= REMEMBERED && count < 1000);
            }
            prop_assert_eq!(delivery.state, DeliveryState::Dead);
            prop_assert!(now + took <= 24 * 3600 * 1000 + 20_000);
        }
    }
}
