//! The numbers that the decisions go by.

use std::time::Duration;

/// Bounds and periods. Those that depend on each other are checked by [`Rules::check`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rules {
    /// Builds at a time on this host.
    pub per_host: usize,
    /// Builds at a time for one tenant, on all hosts.
    pub per_tenant: usize,
    /// Builds that may wait for their turn; more are refused.
    pub queue: usize,
    /// How long a build may wait for its turn.
    pub queue_deadline: Duration,
    /// How long capture and acceptance may take.
    pub finalize_deadline: Duration,
    /// How long an owner is believed to be alive after its last word.
    pub lease: Duration,
    /// Further attempts after failures by no fault of the user.
    pub retries: u32,
    /// Before the first further attempt; doubles.
    pub back_off: Duration,
    /// Further attempts after the end of a server.
    pub interruptions: u32,
    /// How long a failure is remembered the first time; doubles.
    pub negative_first: Duration,
    pub negative_most: Duration,
    /// How long after that another failure still counts as one in a row.
    pub negative_memory: Duration,
    /// How long an artifact may come to exist after its capture was given up.
    pub capture_settle: Duration,
    /// Refused creations after which an image is not used any more.
    pub quarantine_at: u32,
    /// Builds in a row that start from the image before; the next one starts from the base again.
    pub increments: u32,
    /// Images of a lineage that stay besides the newest.
    pub keep: u32,
    /// What all images together may take, if that is bounded.
    pub budget_bytes: Option<u64>,
    /// How long ended builds without an image are kept.
    pub ended_kept: Duration,
    /// Before the first further try to remove an artifact; doubles up to 64 times.
    pub removal_back_off: Duration,
    /// Pushes within this time of the first are answered by one look.
    pub push_window: Duration,
    /// Polls are spread by up to this share of their interval, in percent.
    pub poll_jitter_percent: u32,
}

impl Default for Rules {
    fn default() -> Self {
        let (minute, hour) = (60, 3600);
        Self {
            per_host: 2,
            per_tenant: 2,
            queue: 256,
            queue_deadline: Duration::from_secs(45 * minute),
            finalize_deadline: Duration::from_secs(10 * minute),
            lease: Duration::from_secs(minute),
            retries: 2,
            back_off: Duration::from_secs(2),
            interruptions: 3,
            negative_first: Duration::from_secs(minute),
            negative_most: Duration::from_secs(15 * minute),
            negative_memory: Duration::from_secs(hour),
            capture_settle: Duration::from_secs(15 * minute),
            quarantine_at: 2,
            increments: 16,
            keep: 2,
            budget_bytes: None,
            ended_kept: Duration::from_secs(24 * hour),
            removal_back_off: Duration::from_secs(5),
            push_window: Duration::from_secs(2),
            poll_jitter_percent: 10,
        }
    }
}

impl Rules {
    /// Says what is wrong with the numbers, if anything is.
    ///
    /// # Errors
    /// Names the field and what it has to be.
    pub fn check(&self) -> Result<(), String> {
        let need = |ok: bool, what: &str| if ok { Ok(()) } else { Err(what.to_owned()) };
        need(self.per_host > 0, "per_host must be at least 1")?;
        need(self.per_tenant > 0, "per_tenant must be at least 1")?;
        need(self.lease >= Duration::from_secs(3), "lease must be at least 3 s")?;
        need(self.negative_first <= self.negative_most, "negative_first must not exceed negative_most")?;
        need(self.quarantine_at > 0, "quarantine_at must be at least 1")?;
        need(self.poll_jitter_percent <= 50, "poll_jitter_percent must be at most 50")
    }
}

/// `first`, doubled for each of `before` earlier times, at most `most`.
pub(crate) fn doubled(first: Duration, before: u32, most: Duration) -> Duration {
    first.saturating_mul(2_u32.saturating_pow(before.min(31))).min(most)
}
