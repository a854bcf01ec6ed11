//! The public state, computed from intent and observation; never stored.

use super::{
    boot::{AgentFacts, Link},
    intent::{Create, Intent, Operation, Progress, RemoveReason},
    step::ended,
};
use crate::{
    ports::runtime::{Condition, ExitCause, Observation},
    time::Timestamp,
};

/// The eight public states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    Pending,
    Running,
    Pausing,
    Paused,
    Resuming,
    Stopping,
    Terminated,
    Failed,
}

impl State {
    /// Every state, in lifecycle order.
    pub const ALL: [Self; 8] = [
        Self::Pending,
        Self::Running,
        Self::Pausing,
        Self::Paused,
        Self::Resuming,
        Self::Stopping,
        Self::Terminated,
        Self::Failed,
    ];

    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Running => "Running",
            Self::Pausing => "Pausing",
            Self::Paused => "Paused",
            Self::Resuming => "Resuming",
            Self::Stopping => "Stopping",
            Self::Terminated => "Terminated",
            Self::Failed => "Failed",
        }
    }

    /// The proxy may route to the box.
    pub fn addressable(self) -> bool {
        matches!(self, Self::Running | Self::Pausing | Self::Resuming)
    }

    /// Nothing will run in it again.
    pub fn terminal(self) -> bool {
        matches!(self, Self::Terminated | Self::Failed)
    }
}

/// A state with what explains it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    pub state: State,
    /// A word, stable: in upper case, or in lower case of a sandbox that is made from a repository.
    pub reason: &'static str,
    pub message: Option<String>,
    pub since: Timestamp,
}

/// Derives the public status. `None` when neither an intent nor a box exists: there is no such sandbox.
pub fn compute(
    intent: Option<&Intent>,
    observed: Option<&Observation>,
    agent: Option<&AgentFacts>,
) -> Option<Status> {
    let status = |state, reason, message: Option<String>, since| Status { state, reason, message, since };
    match (intent, observed) {
        (None, None) => None,
        // Nothing is left but the closing of the intent: for everybody else the sandbox is gone.
        (Some(Intent { operation: Operation::Remove { .. }, .. }), None) => None,
        (
            Some(Intent { operation: Operation::Remove { reason, last_error, .. }, accepted_at, .. }),
            Some(observed),
        ) => {
            let word = match reason {
                _ if observed.spec.source.is_some() => reason.word(),
                RemoveReason::UserDelete => "USER_DELETE",
                RemoveReason::Expired => "TTL_EXPIRY",
                RemoveReason::Idle => "IDLE_TIMEOUT",
                RemoveReason::CreateFailed => "CREATE_FAILED",
            };
            let message = last_error.as_ref().map(|e| format!("removal failed and will be tried again: {e}"));
            Some(status(State::Stopping, word, message, *accepted_at))
        }
        (Some(Intent { operation: Operation::Create(create), accepted_at, .. }), observed)
            if create.spec.source.is_some() =>
        {
            Some(making(create, *accepted_at, observed, agent))
        }
        (Some(Intent { operation: Operation::Create(create), accepted_at, .. }), observed) => {
            let failed = matches!(create.progress, Progress::Failed { .. });
            if let Some(observed) =
                observed.filter(|o| !failed && !matches!(o.condition, Condition::Starting))
            {
                return Some(of_box(observed));
            }
            Some(match &create.progress {
                Progress::Accepted => status(State::Pending, "ACCEPTED", None, *accepted_at),
                Progress::Preparing
                | Progress::Resolving
                | Progress::Queued { .. }
                | Progress::Building { .. } => status(State::Pending, "PREPARING_IMAGE", None, *accepted_at),
                Progress::Starting => status(State::Pending, "STARTING", None, *accepted_at),
                Progress::Failed { error, at, .. } => status(
                    State::Failed,
                    "CREATE_FAILED",
                    Some(format!("failed in phase {}: {}", error.phase, error.message)),
                    *at,
                ),
            })
        }
        (Some(intent), Some(observed)) => {
            let now = of_agent(observed, agent);
            Some(match (&intent.operation, now.state) {
                (Operation::Pause, State::Running) => {
                    status(State::Pausing, "PAUSING", None, intent.accepted_at)
                }
                (Operation::Resume, State::Paused) => {
                    status(State::Resuming, "RESUMING", None, intent.accepted_at)
                }
                _ => now,
            })
        }
        // A pause or resume whose box vanished: the reconciler will close the intent; until then say what is true.
        (Some(intent), None) => Some(status(
            State::Failed,
            "BOX_LOST",
            Some("the box disappeared while an operation was in flight".into()),
            intent.accepted_at,
        )),
        (None, Some(observed)) => Some(of_agent(observed, agent)),
    }
}

/// A create from a repository that is not closed: in the words of its steps.
fn making(
    create: &Create,
    accepted_at: Timestamp,
    observed: Option<&Observation>,
    agent: Option<&AgentFacts>,
) -> Status {
    let status = |state, reason, message: Option<String>, since| Status { state, reason, message, since };
    if let Progress::Failed { error, at, failure, .. } = &create.progress {
        return match failure {
            Some(failure) => status(State::Failed, failure.reason.word(), Some(failure.in_words()), *at),
            None => {
                let message = format!("failed in phase {}: {}", error.phase, error.message);
                status(State::Failed, "container_create_failed", Some(message), *at)
            }
        };
    }
    if let Some(observed) = observed.filter(|o| !matches!(o.condition, Condition::Starting)) {
        let seen = of_agent(observed, agent);
        return match &observed.condition {
            // Until the create is given up, which waits for the agent's last words.
            Condition::Exited(exit) if seen.state == State::Failed => {
                Status { message: Some(ended(exit, agent).in_words()), ..seen }
            }
            _ => seen,
        };
    }
    let (reason, message) = match &create.progress {
        Progress::Accepted | Progress::Failed { .. } => ("accepted", None),
        Progress::Resolving => ("image_resolving", None),
        Progress::Queued { build } => ("image_build_queued", Some(format!("waits for image build {build}"))),
        Progress::Building { build } => ("image_building", Some(format!("waits for image build {build}"))),
        Progress::Preparing => ("image_pulling", None),
        Progress::Starting => ("container_creating", None),
    };
    let detour = || create.spec.source.as_ref().and_then(|source| source.detour());
    status(State::Pending, reason, message.or_else(detour), accepted_at)
}

/// A box that exists, in the light of what its agent told. Without an agent whose word is needed, the box alone counts.
fn of_agent(observed: &Observation, agent: Option<&AgentFacts>) -> Status {
    let seen = of_box(observed);
    match (observed.spec.source.is_some(), seen.state) {
        (true, State::Running) => {}
        (true, State::Failed) => return Status { reason: "runtime_error", ..seen },
        _ => return seen,
    }
    let Some(agent) = agent else {
        return Status { state: State::Pending, reason: "agent_connecting", ..seen };
    };
    let (state, reason, message) = match (agent.ready_at, agent.link, agent.complaint()) {
        (None, Link::Expected, _) => (State::Pending, "agent_connecting", None),
        (None, Link::Attached | Link::Unresponsive, _) => {
            let message = agent.phase.as_ref().map(|phase| match &phase.step {
                Some(step) => format!("{} of {step}", phase.name),
                None => phase.name.clone(),
            });
            (State::Pending, "booting", message)
        }
        (Some(_), Link::Unresponsive, _) => {
            (State::Running, "unresponsive", Some("the agent has not been heard of for too long".to_owned()))
        }
        (Some(_), _, Some(complaint)) => (State::Running, "degraded", Some(complaint)),
        (Some(_), _, None) => (State::Running, "ready", None),
    };
    let message = message.or_else(|| observed.spec.source.as_ref()?.detour());
    Status { state, reason, message, since: agent.since.max(seen.since) }
}

fn of_box(observed: &Observation) -> Status {
    let (state, reason, message) = match &observed.condition {
        Condition::Starting => (State::Pending, "STARTING", None),
        Condition::Running => (State::Running, "CONTAINER_RUNNING", None),
        Condition::Paused => (State::Paused, "CONTAINER_PAUSED", None),
        Condition::Exited(exit) => {
            let message = Some(exit.message.clone());
            match (exit.cause, exit.code) {
                (ExitCause::Exited, Some(0)) => (State::Terminated, "CONTAINER_EXITED", message),
                (ExitCause::Exited | ExitCause::Signalled, _) => {
                    (State::Failed, "CONTAINER_EXITED_ERROR", message)
                }
                (ExitCause::OutOfMemory, _) => (State::Failed, "OUT_OF_MEMORY", message),
                (ExitCause::EntrypointFailed, _) => (State::Failed, "ENTRYPOINT_FAILED", message),
                (ExitCause::SupervisorLost, _) => (State::Failed, "SUPERVISOR_LOST", message),
                (ExitCause::EgressLost, _) => (State::Failed, "EGRESS_LOST", message),
                (ExitCause::CreateFailed, _) => (State::Failed, "CREATE_FAILED", message),
            }
        }
    };
    Status { state, reason, message, since: observed.since }
}
