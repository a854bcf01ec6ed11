//! Instants relative to others.

use std::time::Duration;

use sandglass_sandbox::Timestamp;

/// `now + wait`, or the last instant there is.
pub(crate) fn after(now: Timestamp, wait: Duration) -> Timestamp {
    now.checked_add(wait).unwrap_or(Timestamp::clamped(i64::MAX))
}

/// How long ago `then` was; zero for what is still to come.
pub(crate) fn since(now: Timestamp, then: Timestamp) -> Duration {
    then.until(now)
}
