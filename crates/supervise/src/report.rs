//! What supervision tells the rest of the agent, in one order.
//!
//! Invariant: within one life of the agent, sequence numbers have no gap and no report overtakes another.

use std::sync::{Arc, Mutex, PoisonError};

use sandglass_sandbox::Timestamp;
use serde::{Deserialize, Serialize};

use crate::clock::Clock;
use crate::plan::{Phase, StepLimits};
use crate::ports::Exit;
use crate::service::definition::Kind;
use crate::service::state::State;

/// Takes reports. Called in their order; must neither wait nor report itself.
pub trait Events: Send + Sync + 'static {
    fn emit(&self, report: Report);
}

/// An event with its place in the order.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Report {
    /// From 1.
    pub seq: u64,
    pub at: Timestamp,
    #[serde(flatten)]
    pub event: Event,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", content = "data")]
pub enum Event {
    #[serde(rename = "boot.phase_started")]
    PhaseStarted {
        #[serde(flatten)]
        step: Step,
        /// By which somebody who watches can tell when to expect something.
        #[serde(flatten)]
        limits: StepLimits,
    },
    #[serde(rename = "boot.phase_progress")]
    PhaseProgress {
        #[serde(flatten)]
        step: Step,
        message: String,
    },
    #[serde(rename = "boot.phase_finished")]
    PhaseFinished {
        #[serde(flatten)]
        step: Step,
        outcome: StepOutcome,
        #[serde(rename = "durationMs")]
        duration_ms: u64,
    },
    #[serde(rename = "boot.warning")]
    BootWarning(Failure),
    #[serde(rename = "boot.completed")]
    BootCompleted { warnings: u32 },
    #[serde(rename = "boot.failed")]
    BootFailed(Failure),
    #[serde(rename = "boot.cancelled")]
    BootCancelled { phase: Phase },
    #[serde(rename = "service.state_changed")]
    ServiceChanged(ServiceChange),
    /// A service without which the box is of no use was given up.
    #[serde(rename = "service.required_failed")]
    RequiredServiceFailed(Failure),
}

/// A part of the boot: a phase, and within it whose turn it is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Step {
    pub phase: Phase,
    /// The label of a hook.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
}

impl std::fmt::Display for Step {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.step {
            Some(step) => write!(f, "{} of {step}", self.phase),
            None => write!(f, "{}", self.phase),
        }
    }
}

/// How a step ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StepOutcome {
    Done,
    /// There was nothing to do, for example because the image has it.
    Skipped,
    /// It failed and the boot goes on.
    Warned,
    Failed,
    Cancelled,
}

/// The reason that a sandbox shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    BootFailed,
    BootTimeout,
    ServiceFailed,
}

impl Reason {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::BootFailed => "boot_failed",
            Self::BootTimeout => "boot_timeout",
            Self::ServiceFailed => "service_failed",
        }
    }
}

/// Why the boot or a required service failed. Free of secrets, and at most 20 KiB as JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    pub reason: Reason,
    /// A more exact reason, where the failed part knows one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<String>,
    #[serde(flatten)]
    pub step: Step,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    pub message: String,
    pub output_tail: String,
}

/// Longer messages are cut.
const MAX_MESSAGE: usize = 1024;

impl Failure {
    /// `message` must be free of secrets; the tail is one that [`crate::tail`] made.
    pub fn new(
        reason: Reason,
        step: Step,
        message: String,
        exit: Option<Exit>,
        output_tail: String,
    ) -> Failure {
        let message = crate::tail::bounded(message.as_bytes());
        let mut end = message.len().min(MAX_MESSAGE);
        while !message.is_char_boundary(end) {
            end -= 1;
        }
        Failure {
            reason,
            cause: None,
            step,
            exit_code: exit.and_then(Exit::code),
            signal: exit.and_then(Exit::signal),
            message: message[..end].to_owned(),
            output_tail,
        }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.step, self.message)
    }
}

/// A service is in another state now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceChange {
    pub name: String,
    pub kind: Kind,
    pub from: State,
    pub to: State,
    pub required: bool,
    pub restart_count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<Exit>,
    /// When what runs now, or ran last, was started.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "sandglass_sandbox::time::text")]
    pub started_at: Option<Timestamp>,
    /// Why, where something went wrong.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Numbers reports and hands them on; clones share the numbers.
#[derive(Clone)]
pub struct Reporter {
    shared: Arc<Shared>,
}

struct Shared {
    last: Mutex<u64>,
    events: Arc<dyn Events>,
    clock: Arc<dyn Clock>,
}

impl Reporter {
    pub fn new(events: Arc<dyn Events>, clock: Arc<dyn Clock>) -> Self {
        Reporter { shared: Arc::new(Shared { last: Mutex::new(0), events, clock }) }
    }

    pub fn report(&self, event: Event) {
        // Held while it is handed on: the order of the numbers is the order of the calls.
        let mut last = self.shared.last.lock().unwrap_or_else(PoisonError::into_inner);
        *last += 1;
        self.shared.events.emit(Report { seq: *last, at: self.shared.clock.wall(), event });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_of_a_report_is_kept() {
        let step = Step { phase: Phase::Setup, step: Some("web".into()) };
        let failure = Failure::new(
            Reason::BootFailed,
            step.clone(),
            "exit\u{7} status 3".into(),
            Some(Exit::Code(3)),
            "x".into(),
        );
        let report = Report { seq: 7, at: Timestamp::clamped(1), event: Event::BootFailed(failure) };
        let json = r#"{"seq":7,"at":1,"type":"boot.failed","data":{"reason":"boot_failed","phase":"setup","step":"web","exitCode":3,"message":"exit status 3","outputTail":"x"}}"#;
        assert_eq!(serde_json::to_string(&report).unwrap(), json);
        assert_eq!(serde_json::from_str::<Report>(json).unwrap(), report);
        let limits = StepLimits { timeout_seconds: 300, cap_seconds: None };
        let started = Event::PhaseStarted { step: step.clone(), limits };
        assert_eq!(
            serde_json::to_string(&started).unwrap(),
            r#"{"type":"boot.phase_started","data":{"phase":"setup","step":"web","timeoutSeconds":300}}"#
        );
        let finished = Event::PhaseFinished { step, outcome: StepOutcome::Done, duration_ms: 5 };
        assert_eq!(
            serde_json::to_string(&finished).unwrap(),
            r#"{"type":"boot.phase_finished","data":{"phase":"setup","step":"web","outcome":"done","durationMs":5}}"#
        );
        let change = ServiceChange {
            name: "app".into(),
            kind: Kind::Custom,
            from: State::Ready,
            to: State::Failed,
            required: false,
            restart_count: 2,
            last_exit: Some(Exit::Signal(9)),
            started_at: Some(Timestamp::clamped(1_893_456_000_500)),
            error: None,
        };
        let json = r#"{"name":"app","kind":"custom","from":"Ready","to":"Failed","required":false,"restartCount":2,"lastExit":{"signal":9},"startedAt":"2030-01-01T00:00:00.500000Z"}"#;
        assert_eq!(serde_json::to_string(&change).unwrap(), json);
        assert_eq!(serde_json::from_str::<ServiceChange>(json).unwrap(), change);
        let early = json.replace(r#","startedAt":"2030-01-01T00:00:00.500000Z""#, "");
        assert_eq!(
            serde_json::from_str::<ServiceChange>(&early).unwrap().started_at,
            None,
            "of an earlier agent"
        );
    }
}
