//! Time as supervision needs it: a monotonic one for decisions, the wall's only to be shown.

use std::future::Future;
use std::ops::Add;
use std::pin::Pin;
use std::time::Duration;

use sandglass_sandbox::Timestamp;
use tokio::time::Instant;

/// A point of monotonic time, as the time since some start of the clock. Setting the wall clock moves none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(Duration);

impl Moment {
    pub const fn since_start(elapsed: Duration) -> Self {
        Moment(elapsed)
    }

    pub const fn elapsed(self) -> Duration {
        self.0
    }

    /// How long from `earlier` to `self`; zero when it is not earlier.
    pub fn since(self, earlier: Moment) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<Duration> for Moment {
    type Output = Moment;

    fn add(self, duration: Duration) -> Moment {
        Moment(self.0.saturating_add(duration))
    }
}

/// Where time comes from.
pub trait Clock: Send + Sync + 'static {
    fn now(&self) -> Moment;

    /// For people and for the server; nothing is decided by it.
    fn wall(&self) -> Timestamp;

    /// Completes at that moment, at once when it is over.
    fn sleep_until(&self, at: Moment) -> Pin<Box<dyn Future<Output = ()> + Send>>;
}

/// The runtime's clock. Tests pause that.
#[derive(Debug, Clone, Copy)]
pub struct SystemClock {
    start: Instant,
}

impl SystemClock {
    /// A clock that starts now.
    pub fn start() -> Self {
        SystemClock { start: Instant::now() }
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        Moment(self.start.elapsed())
    }

    fn wall(&self) -> Timestamp {
        sandglass_sandbox::Clock::now(&sandglass_sandbox::SystemClock)
    }

    fn sleep_until(&self, at: Moment) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        // Too far away to be written as an instant is as good as never.
        match self.start.checked_add(at.0) {
            Some(at) => Box::pin(tokio::time::sleep_until(at)),
            None => Box::pin(std::future::pending()),
        }
    }
}
