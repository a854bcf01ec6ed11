//! A wall clock on tokio's (pausable) time, so that advancing one moves both timers and timestamps.

use sandglass_sandbox::{Clock, Timestamp};
use tokio::time::Instant;

/// Starts at a fixed instant; create it inside a runtime.
#[derive(Debug, Clone)]
pub struct ManualClock {
    base: Timestamp,
    started: Instant,
}

impl Default for ManualClock {
    fn default() -> Self {
        Self { base: Timestamp::clamped(1_800_000_000_000), started: Instant::now() }
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        self.base.checked_add(self.started.elapsed()).unwrap_or(self.base)
    }
}
