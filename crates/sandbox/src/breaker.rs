//! Whether another sandbox of a kind is worth the attempt: after some failures in a row, for a while none is.
//!
//! ```text
//!   Closed ──failures within the window──► Open ──its time is over, one create──► HalfOpen
//!     ▲                                     ▲                                        │
//!     │                                     └────────── the probe failed ────────────┤
//!     └─────────────── any sandbox of the kind became ready ─────────────────────────┘
//! ```
//!
//! Pure. What is counted is whether sandboxes become ready, not whether a create is accepted. One that its user gave up counts as nothing.
//! Every call is idempotent by sandbox, so that it can be repeated when a write is in doubt.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{ids::SandboxId, time::Timestamp};

/// The open time doubles up to this.
const LONGEST_OPEN: Duration = Duration::from_secs(900);

/// Numbers that a breaker works by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Failures within the window that open it; 0 for never.
    pub failures: u32,
    pub window: Duration,
    /// How long it stays open the first time.
    pub open: Duration,
    /// A probe of which nothing was heard for so long is given up.
    pub probe: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            failures: 3,
            window: Duration::from_secs(300),
            open: Duration::from_secs(60),
            probe: Duration::from_secs(2700),
        }
    }
}

/// See the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Breaker {
    /// Creates pass. Failures within the window, oldest first.
    #[default]
    Empty,
    #[serde(rename_all = "camelCase")]
    Closed { failures: Vec<(SandboxId, Timestamp)> },
    /// None passes before `until`; `times` it was opened since it was closed.
    #[serde(rename_all = "camelCase")]
    Open { until: Timestamp, times: u32 },
    /// One was let through, and decides.
    #[serde(rename_all = "camelCase")]
    HalfOpen { probe: SandboxId, given_up_at: Timestamp, times: u32 },
}

/// Whether a create may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Pass,
    /// As the one that decides: the breaker has changed and has to be stored before the create goes on.
    Probe,
    /// Not before this time has passed.
    Refused(Duration),
}

/// While a probe is under way its outcome cannot be foretold; look again after this time.
const WHILE_PROBING: Duration = Duration::from_secs(10);

impl Breaker {
    /// Whether there is nothing to remember.
    pub fn is_empty(&self) -> bool {
        *self == Self::Empty
    }

    /// A sandbox is about to be accepted.
    pub fn admit(&mut self, id: SandboxId, now: Timestamp, limits: &Limits) -> Admission {
        if limits.failures == 0 {
            return Admission::Pass;
        }
        let times = match *self {
            Self::Empty | Self::Closed { .. } => return Admission::Pass,
            Self::Open { until, .. } if now < until => return Admission::Refused(now.until(until)),
            Self::HalfOpen { probe, .. } if probe == id => return Admission::Probe,
            Self::HalfOpen { given_up_at, .. } if now < given_up_at => {
                return Admission::Refused(now.until(given_up_at).min(WHILE_PROBING));
            }
            Self::Open { times, .. } | Self::HalfOpen { times, .. } => times,
        };
        let given_up_at = now.checked_add(limits.probe).unwrap_or(now);
        *self = Self::HalfOpen { probe: id, given_up_at, times };
        Admission::Probe
    }

    /// A sandbox did not become ready.
    pub fn failed(&mut self, id: SandboxId, now: Timestamp, limits: &Limits) {
        if limits.failures == 0 {
            return;
        }
        match self {
            Self::Empty => *self = Self::Closed { failures: vec![(id, now)] },
            Self::Closed { failures } => {
                failures.retain(|(_, at)| at.until(now) < limits.window);
                if failures.iter().all(|(known, _)| *known != id) {
                    failures.push((id, now));
                }
            }
            Self::HalfOpen { probe, times, .. } if *probe == id => {
                let times = times.saturating_add(1);
                *self = Self::open(times, now, limits);
            }
            // Accepted before it opened: it says nothing new.
            Self::Open { .. } | Self::HalfOpen { .. } => {}
        }
        if let Self::Closed { failures } = self
            && failures.len() >= usize::try_from(limits.failures).unwrap_or(usize::MAX)
        {
            *self = Self::open(1, now, limits);
        }
    }

    /// A sandbox became ready.
    pub fn ready(&mut self) {
        *self = Self::Empty;
    }

    /// A sandbox was given up by its user before it was ready. If it was the probe, the next create is.
    pub fn withdrawn(&mut self, id: SandboxId, now: Timestamp) {
        if let Self::HalfOpen { probe, times, .. } = *self
            && probe == id
        {
            *self = Self::Open { until: now, times };
        }
    }

    fn open(times: u32, now: Timestamp, limits: &Limits) -> Self {
        let open = limits.open.saturating_mul(1 << times.saturating_sub(1).min(10));
        let until = now.checked_add(open.min(LONGEST_OPEN.max(limits.open))).unwrap_or(now);
        Self::Open { until, times }
    }
}

#[cfg(test)]
#[path = "breaker_tests.rs"]
mod tests;
