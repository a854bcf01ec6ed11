//! What to do next about an open intent: pure, total, and the only place that decides it.

use std::time::Duration;

use super::{
    boot::{AgentFacts, Failure, Reason},
    intent::{Create, Intent, Operation, Progress},
};
use crate::{
    ports::runtime::{Condition, Exit, Observation},
    time::Timestamp,
};

/// The next effect for one sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing is wanted that is not so.
    Nothing,
    /// Look again at this instant, or when the runtime reports a change.
    WaitUntil(Timestamp),
    /// Find the image, or have it built.
    Resolve,
    Prepare,
    Start,
    Pause,
    Resume,
    Remove,
    /// The runtime shows the effect: the intent has done its work.
    Close(Outcome),
    /// A box showed up whose create has failed for good: nobody waits for it.
    Discard,
    /// The create cannot go on.
    FailCreate(&'static str),
    /// What was made from a repository cannot come up any more.
    GiveUp(Box<Failure>),
}

/// How a closed intent ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    Done,
    /// The box ended or vanished before the operation took effect.
    Overtaken,
    /// The deadline passed without effect.
    TimedOut,
}

/// Decides. `credentials_at_hand` is false after a restart, when a private pull cannot be repeated.
pub fn next(
    intent: Option<&Intent>,
    observed: Option<&Observation>,
    agent: Option<&AgentFacts>,
    credentials_at_hand: bool,
    now: Timestamp,
) -> Step {
    let Some(intent) = intent else { return Step::Nothing };
    let condition = observed.map(|o| &o.condition);
    match &intent.operation {
        Operation::Remove { not_before: Some(at), .. } if *at > now => Step::WaitUntil(*at),
        // Also when no box is seen: removing is idempotent, and only the runtime knows that nothing is left.
        Operation::Remove { .. } => Step::Remove,
        Operation::Create(create) => match (condition, &create.progress) {
            (Some(_), Progress::Failed { keep_until: Some(at), .. }) if *at > now => Step::WaitUntil(*at),
            (Some(_), Progress::Failed { .. }) => Step::Discard,
            (None, Progress::Failed { .. }) => Step::Nothing,
            _ if create.spec.source.is_some() => {
                of_repository(create, condition, agent, (credentials_at_hand, intent.deadline), now)
            }
            (Some(Condition::Starting) | None, _) if now >= intent.deadline => {
                Step::FailCreate("the box did not become ready in time")
            }
            (
                Some(Condition::Starting) | None,
                Progress::Accepted
                | Progress::Preparing
                | Progress::Resolving
                | Progress::Queued { .. }
                | Progress::Building { .. },
            ) if create.had_credentials && !credentials_at_hand => Step::FailCreate(
                "the server restarted during a pull whose credentials it does not keep; create it again",
            ),
            // A half-made box is left by an attempt that was cut short; making it again begins by clearing it away.
            (Some(Condition::Starting) | None, Progress::Starting) => Step::Start,
            (Some(Condition::Starting) | None, _) => Step::Prepare,
            (Some(_), _) => Step::Close(Outcome::Done),
        },
        Operation::Pause => match condition {
            Some(Condition::Running) if now < intent.deadline => Step::Pause,
            Some(Condition::Running | Condition::Starting) => Step::Close(Outcome::TimedOut),
            Some(Condition::Paused) => Step::Close(Outcome::Done),
            Some(Condition::Exited(_)) | None => Step::Close(Outcome::Overtaken),
        },
        Operation::Resume => match condition {
            Some(Condition::Paused) if now < intent.deadline => Step::Resume,
            Some(Condition::Paused | Condition::Starting) => Step::Close(Outcome::TimedOut),
            Some(Condition::Running) => Step::Close(Outcome::Done),
            Some(Condition::Exited(_)) | None => Step::Close(Outcome::Overtaken),
        },
    }
}

/// How long after its end a box's agent may still be heard.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// The same for a box that is made from a repository: its image is found first, and it is done when its agent says so.
fn of_repository(
    create: &Create,
    condition: Option<&Condition>,
    agent: Option<&AgentFacts>,
    (credentials_at_hand, deadline): (bool, Timestamp),
    now: Timestamp,
) -> Step {
    let give_up = |failure: Failure| Step::GiveUp(Box::new(failure));
    if let Some(failure) = agent.and_then(|agent| agent.failure.clone()) {
        return give_up(failure);
    }
    match condition {
        // What the agent has to say of its end may be a moment behind the end itself.
        Some(Condition::Exited(exit)) => match exit.at.checked_add(LAST_WORDS) {
            Some(at) if now < at && agent.is_some() => Step::WaitUntil(at),
            _ => give_up(ended(exit, agent)),
        },
        Some(Condition::Running | Condition::Paused)
            if agent.is_some_and(|agent| agent.ready_at.is_some()) =>
        {
            Step::Close(Outcome::Done)
        }
        _ if now >= deadline => give_up(Failure::new(
            Reason::ProvisionTimeout,
            "the sandbox was not ready within the time that provisioning may take",
        )),
        Some(Condition::Running | Condition::Paused) => Step::WaitUntil(deadline),
        Some(Condition::Starting) | None => {
            let found = create.spec.source.as_ref().is_some_and(|source| source.found.is_some());
            match create.progress {
                _ if !found => Step::Resolve,
                _ if create.had_credentials && !credentials_at_hand => give_up(Failure::new(
                    Reason::ContainerCreateFailed,
                    "the server restarted while the box was made, and does not keep keys of object stores; create it again",
                )),
                Progress::Starting => Step::Start,
                _ => Step::Prepare,
            }
        }
    }
}

/// The box ended before it was ready.
pub(super) fn ended(exit: &Exit, agent: Option<&AgentFacts>) -> Failure {
    let phase = agent.and_then(|agent| agent.phase.as_ref()).map(|phase| phase.name.clone());
    Failure {
        phase,
        exit_code: exit.code,
        signal: exit.signal,
        ..Failure::new(Reason::RuntimeError, format!("the box ended before it was ready: {}", exit.message))
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
