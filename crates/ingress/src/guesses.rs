//! How often a wrong credential may be tried on one sandbox.
//!
//! Signatures of the short generation have 32 bits, so trying must be slow. Holds at most [`CAPACITY`] sandboxes; when they are all being
//! tried, the others share one allowance.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

const CAPACITY: usize = 8192;
/// Failures at once.
const BURST: u32 = 60;
/// Then one in this time: years for half of all short signatures.
const EACH: Duration = Duration::from_secs(1);

/// Failures by sandbox.
#[derive(Debug, Default)]
pub struct Guesses {
    /// When the allowance of a sandbox will be whole again.
    whole_at: Mutex<HashMap<String, Instant>>,
}

impl Guesses {
    fn whole_at(&self) -> MutexGuard<'_, HashMap<String, Instant>> {
        self.whole_at.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another try is allowed.
    #[must_use]
    pub fn allow(&self, sandbox: &str, now: Instant) -> bool {
        let notes = self.whole_at();
        let whole = notes.get(sandbox).or_else(|| notes.get("").filter(|_| notes.len() > CAPACITY));
        whole.is_none_or(|whole| whole.saturating_duration_since(now) < EACH * BURST)
    }

    /// Notes a failure.
    pub fn failed(&self, sandbox: &str, now: Instant) {
        let mut notes = self.whole_at();
        if notes.len() >= CAPACITY && !notes.contains_key(sandbox) {
            notes.retain(|_, whole| *whole > now);
        }
        let sandbox = if notes.len() >= CAPACITY && !notes.contains_key(sandbox) { "" } else { sandbox };
        let whole = notes.entry(sandbox.to_owned()).or_insert(now);
        // Nobody has to wait for longer than the whole allowance takes.
        *whole = ((*whole).max(now) + EACH).min(now + EACH * (BURST + 1));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_are_slowed_down_by_sandbox() {
        let (guesses, start) = (Guesses::default(), Instant::now());
        for _ in 0..BURST {
            assert!(guesses.allow("a", start));
            guesses.failed("a", start);
        }
        assert!(!guesses.allow("a", start));
        assert!(guesses.allow("b", start), "another sandbox is another matter");
        for _ in 0..1000 {
            guesses.failed("a", start);
        }
        assert!(guesses.allow("a", start + EACH * 2), "flooding does not make it worse");
        guesses.failed("a", start + EACH * 2);
        assert!(guesses.allow("a", start + EACH * (BURST + 3)));
    }

    #[test]
    fn memory_is_bounded() {
        let (guesses, start) = (Guesses::default(), Instant::now());
        for number in 0..CAPACITY + 2 * BURST as usize {
            guesses.failed(&number.to_string(), start);
        }
        assert!(guesses.whole_at().len() <= CAPACITY + 1);
        assert!(!guesses.allow("another", start), "what is beyond shares an allowance");
        assert!(guesses.allow("1", start));
        guesses.failed("another", start + EACH * (2 * BURST + 3));
        assert_eq!(guesses.whole_at().len(), 1, "what is over is forgotten");
    }
}
