//! Monotonic time, in whole milliseconds since an origin that only its owner knows.
//!
//! Pure parts take a [`Moment`] as an argument and read no clock. Moments of two processes are never compared.

use std::time::Duration;

use tokio::time::Instant;

/// A point on one process's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Moment(u64);

impl Moment {
    pub const fn from_millis(ms: u64) -> Self {
        Self(ms)
    }

    pub const fn as_millis(self) -> u64 {
        self.0
    }

    /// This much later, rounded up to a millisecond: a deadline never comes early.
    #[must_use]
    pub fn after(self, wait: Duration) -> Self {
        let ms = wait.as_nanos().div_ceil(1_000_000);
        Self(self.0.saturating_add(u64::try_from(ms).unwrap_or(u64::MAX)))
    }

    /// How long ago `earlier` was; zero when it was not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

/// The runtime's monotonic clock, which stands still when a test pauses time.
#[derive(Debug, Clone, Copy)]
pub struct Monotonic(Instant);

impl Monotonic {
    /// A clock whose origin is now.
    pub fn start() -> Self {
        Self(Instant::now())
    }

    pub fn now(&self) -> Moment {
        Moment(u64::try_from(self.0.elapsed().as_millis()).unwrap_or(u64::MAX))
    }

    /// The runtime's instant of `moment`, to sleep until.
    pub fn instant(&self, moment: Moment) -> Instant {
        self.0 + Duration::from_millis(moment.0)
    }
}
