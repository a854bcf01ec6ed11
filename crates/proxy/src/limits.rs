//! How long and how much, in one place.

use std::time::Duration;

/// Limits of one forwarder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long a TCP connect may take.
    pub connect: Duration,
    /// How long a backend may neither take request bytes nor answer. A client that sends its body slowly does not count
    /// against the backend. There is no such limit after the response head: streams may be silent for hours.
    pub response_head: Duration,
    /// How long an unused connection is kept. Shorter than the keep-alive of common servers (2 s in gunicorn, 5 s in
    /// uvicorn and Node), so that the backend is rarely the one that closes, which would race with the next request.
    pub idle: Duration,
    /// How many unused connections are kept for one address and port.
    pub idle_per_target: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connect: Duration::from_secs(5),
            response_head: Duration::from_secs(180),
            idle: Duration::from_millis(1500),
            idle_per_target: 64,
        }
    }
}
