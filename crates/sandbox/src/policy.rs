//! What happens to a sandbox that nobody uses, or whose time is over: pure, total, and the only place that decides it.
//!
//! Two clocks. The expiry is an instant that only renewals move; its action begins [`Policies::expire_reserve`] before it. The idle clock
//! begins when the sandbox is ready and starts again with every use. Whoever watches sandboxes collects [`Usage`], asks [`next`], does what it
//! says, and asks again.
//!
//! Use and presence: a running command, a request through a proxy or an explicit lease is use. Something that is merely open (a terminal, an
//! SSH session, a connection) is presence, which counts for at most [`Policies::max_presence`] after the last use. A heartbeat is neither.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{ids::SnapshotId, lifecycle::state::State, time::Timestamp};

/// Presence counts for so long by default.
pub const DEFAULT_PRESENCE: Duration = Duration::from_secs(3600);
/// An action of expiry other than the end begins so long before by default.
pub const DEFAULT_RESERVE: Duration = Duration::from_secs(300);
/// The longest lease that can be asked for at once.
pub const LONGEST_LEASE: Duration = Duration::from_secs(3600);
/// Attempts of an action of expiry.
pub const ATTEMPTS: u32 = 3;
/// Between the first two attempts of an action; doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(15);
/// The longest time between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(900);

/// What is done.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// The sandbox goes.
    #[default]
    Terminate,
    /// It is frozen, and stays.
    Pause,
    /// A snapshot is made, then the sandbox goes.
    Snapshot,
}

impl Action {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Terminate => "terminate",
            Self::Pause => "pause",
            Self::Snapshot => "snapshot",
        }
    }
}

/// `policies` of a request, checked. Kept with the box.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Policies {
    pub on_expire: Action,
    /// Seconds before the expiry at which its action begins; of no meaning for [`Action::Terminate`].
    pub expire_reserve_seconds: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub idle: Option<Idle>,
    /// The life that was asked for: what a sandbox that was frozen at its expiry gets when it is resumed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub life_seconds: Option<u64>,
    /// Where its snapshots belong, on a server with tenants.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
}

/// The idle policy. Whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Idle {
    /// At least 1.
    pub timeout_seconds: u64,
    pub action: Action,
    pub max_presence_seconds: u64,
}

impl Idle {
    fn timeout(self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }
}

impl Policies {
    /// How long before the expiry its action begins.
    pub fn expire_reserve(&self) -> Duration {
        match self.on_expire {
            Action::Terminate => Duration::ZERO,
            Action::Pause | Action::Snapshot => Duration::from_secs(self.expire_reserve_seconds),
        }
    }

    /// How long presence counts after the last use.
    pub fn max_presence(&self) -> Duration {
        self.idle.map_or(Duration::ZERO, |idle| Duration::from_secs(idle.max_presence_seconds))
    }

    /// When the action of an expiry begins.
    pub fn begins_at(&self, expires_at: Timestamp) -> Timestamp {
        earlier(expires_at, self.expire_reserve())
    }
}

/// What is known of the use of one sandbox. Instants only move forward.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Usage {
    /// The last use, or when the clock began.
    pub used_at: Timestamp,
    /// When something was last seen to be open.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub present_at: Option<Timestamp>,
    /// In use until then, because somebody said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leased_until: Option<Timestamp>,
    /// The action that was begun and is not over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub taking: Option<Taking>,
}

/// Why an action is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cause {
    Expiry,
    Idle,
}

impl Cause {
    /// The field of the request that asked for it, which names snapshots, too.
    pub fn word(self) -> &'static str {
        match self {
            Self::Expiry => "onExpire",
            Self::Idle => "idleAction",
        }
    }
}

/// An action that was begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Taking {
    pub cause: Cause,
    /// Attempts so far, the one under way included.
    pub attempts: u32,
    /// Of the attempt under way or the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<SnapshotId>,
    /// The last attempt failed: not again before this instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_before: Option<Timestamp>,
    /// Why it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl Taking {
    /// The first attempt.
    pub fn first(cause: Cause, snapshot: Option<SnapshotId>) -> Self {
        Self { cause, attempts: 1, snapshot, not_before: None, error: None }
    }

    /// The attempt after this one.
    #[must_use]
    pub fn again(&self, snapshot: Option<SnapshotId>) -> Self {
        Self { attempts: self.attempts.saturating_add(1), snapshot, not_before: None, ..self.clone() }
    }

    /// This attempt failed.
    #[must_use]
    pub fn failed(&self, error: String, now: Timestamp) -> Self {
        let doubled = FIRST_PAUSE.saturating_mul(1 << self.attempts.saturating_sub(1).min(10));
        let not_before = now.checked_add(doubled.min(LONGEST_PAUSE)).or(Some(now));
        Self { not_before, error: Some(error), ..self.clone() }
    }
}

impl Usage {
    /// Nothing is known but when the clock began.
    pub fn begun(at: Timestamp) -> Self {
        Self { used_at: at, present_at: None, leased_until: None, taking: None }
    }

    /// It was used.
    pub fn used(&mut self, at: Timestamp) {
        self.used_at = self.used_at.max(at);
    }

    /// Something was open in it.
    pub fn present(&mut self, at: Timestamp) {
        self.present_at = self.present_at.max(Some(at));
    }

    /// It counts as used until then.
    pub fn lease(&mut self, until: Timestamp) {
        self.leased_until = self.leased_until.max(Some(until));
    }

    /// Until when it counts as used, as far as is known.
    pub fn in_use_until(&self, max_presence: Duration) -> Timestamp {
        let bound = later(self.used_at, max_presence);
        let present = self.present_at.map_or(self.used_at, |at| at.min(bound));
        self.used_at.max(present).max(self.leased_until.unwrap_or(self.used_at))
    }

    /// When its idle action is due unless it is used before; `None` without such a policy.
    pub fn idle_at(&self, policies: &Policies) -> Option<Timestamp> {
        let idle = policies.idle?;
        Some(later(self.in_use_until(policies.max_presence()), idle.timeout()))
    }
}

fn later(at: Timestamp, by: Duration) -> Timestamp {
    at.checked_add(by).unwrap_or_else(|| Timestamp::clamped(i64::MAX))
}

fn earlier(at: Timestamp, by: Duration) -> Timestamp {
    Timestamp::clamped(at.as_millis().saturating_sub(i64::try_from(by.as_millis()).unwrap_or(i64::MAX)))
}

/// How the snapshot of an action stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Capture {
    /// There is none, or its record is gone.
    #[default]
    None,
    UnderWay,
    Ready,
    Failed,
}

/// What is to be judged.
#[derive(Debug, Clone, Copy)]
pub struct Case<'a> {
    pub policies: &'a Policies,
    pub state: State,
    pub expires_at: Option<Timestamp>,
    /// `None` until the idle clock has begun, and while what is going on in the sandbox is not known.
    pub usage: Option<&'a Usage>,
    /// The action that was begun and is not over.
    pub taking: Option<&'a Taking>,
    /// Of the snapshot that [`Case::taking`] names.
    pub capture: Capture,
    pub now: Timestamp,
}

/// What to do about it now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// Nothing before something happens.
    Rest,
    /// Nothing before this instant.
    Wait(Timestamp),
    /// An operation has to end first, which has a deadline of its own.
    Hold,
    /// Freeze it.
    Pause(Cause),
    /// Begin a snapshot.
    Capture(Cause),
    /// Remove it.
    Remove(Cause),
}

impl Next {
    /// What an attempt is made of.
    fn attempt(cause: Cause, action: Action) -> Self {
        match action {
            Action::Terminate => Self::Remove(cause),
            Action::Pause => Self::Pause(cause),
            Action::Snapshot => Self::Capture(cause),
        }
    }

    fn or_sooner(self, other: Self) -> Self {
        match (self, other) {
            (Self::Wait(a), Self::Wait(b)) => Self::Wait(a.min(b)),
            (Self::Rest, other) => other,
            (acts, _) => acts,
        }
    }
}

/// Decides. The expiry comes first: what is over need not become idle.
pub fn next(case: &Case<'_>) -> Next {
    if case.state == State::Stopping {
        return Next::Rest;
    }
    match expiry(case) {
        waits @ (Next::Rest | Next::Wait(_)) => match idle(case) {
            acts @ (Next::Pause(_) | Next::Capture(_) | Next::Remove(_) | Next::Hold) => acts,
            waits_too => waits.or_sooner(waits_too),
        },
        acts => acts,
    }
}

/// Whether an action that was begun is pointless by now: the sandbox was renewed, or used.
pub fn withdrawn(case: &Case<'_>) -> bool {
    case.taking.is_some_and(|taking| match taking.cause {
        Cause::Expiry => case.expires_at.is_none_or(|at| case.now < case.policies.begins_at(at)),
        Cause::Idle => {
            case.usage.and_then(|usage| usage.idle_at(case.policies)).is_some_and(|at| case.now < at)
        }
    })
}

fn of(case: &Case<'_>, cause: Cause) -> (Capture, u32, Option<Timestamp>) {
    match case.taking.filter(|taking| taking.cause == cause) {
        Some(taking) => (case.capture, taking.attempts, taking.not_before),
        None => (Capture::None, 0, None),
    }
}

fn expiry(case: &Case<'_>) -> Next {
    let Some(expires_at) = case.expires_at else { return Next::Rest };
    let (policies, now) = (case.policies, case.now);
    let begins_at = policies.begins_at(expires_at);
    if now < begins_at {
        return Next::Wait(begins_at);
    }
    let end = if now < expires_at { Next::Wait(expires_at) } else { Next::Remove(Cause::Expiry) };
    let freezing = matches!(case.state, State::Pausing | State::Resuming);
    let (capture, attempts, not_before) = of(case, Cause::Expiry);
    // A snapshot that began in time may end, and its deadline is its own.
    if capture == Capture::UnderWay {
        return Next::Hold;
    }
    if freezing {
        // What is in the middle of something is dealt with afterwards.
        return Next::Hold;
    }
    let attempt = |end: Next| match not_before {
        _ if attempts >= ATTEMPTS => end,
        Some(at) if now < at => match end {
            Next::Wait(until) => Next::Wait(until.min(at)),
            // The time is over, and there was an attempt.
            end => end,
        },
        _ => Next::attempt(Cause::Expiry, policies.on_expire),
    };
    match (policies.on_expire, case.state) {
        (Action::Terminate, _) => end,
        (_, State::Pending | State::Terminated | State::Failed) => end,
        (Action::Pause, State::Paused) => Next::Rest,
        (Action::Snapshot, _) if capture == Capture::Ready => end,
        // Overdue because the server was away: once, all the same.
        _ if now >= expires_at && attempts > 0 && not_before.is_some() => end,
        _ => attempt(end),
    }
}

fn idle(case: &Case<'_>) -> Next {
    let (Some(idle), Some(usage)) = (case.policies.idle, case.usage) else { return Next::Rest };
    let Some(idle_at) = usage.idle_at(case.policies) else { return Next::Rest };
    if case.state != State::Running {
        return Next::Rest;
    }
    let (capture, _, not_before) = of(case, Cause::Idle);
    if case.now < idle_at {
        return Next::Wait(idle_at);
    }
    match (idle.action, capture) {
        (_, Capture::UnderWay) => Next::Hold,
        (Action::Snapshot, Capture::Ready) => Next::Remove(Cause::Idle),
        (action, _) => match not_before {
            Some(at) if case.now < at => Next::Wait(at),
            _ => Next::attempt(Cause::Idle, action),
        },
    }
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
