//! What to do next about an open intent: pure, total, and the only place that decides it.

use super::intent::{Intent, Operation, Progress};
use crate::{
    ports::runtime::{Condition, Observation},
    time::Timestamp,
};

/// The next effect for one sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Nothing is wanted that is not so.
    Nothing,
    /// Look again at this instant, or when the runtime reports a change.
    WaitUntil(Timestamp),
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
            (Some(_), Progress::Failed { .. }) => Step::Discard,
            (None, Progress::Failed { .. }) => Step::Nothing,
            (Some(Condition::Starting) | None, _) if now >= intent.deadline => {
                Step::FailCreate("the box did not become ready in time")
            }
            (Some(Condition::Starting) | None, Progress::Accepted | Progress::Preparing)
                if create.had_credentials && !credentials_at_hand =>
            {
                Step::FailCreate(
                    "the server restarted during a pull whose credentials it does not keep; create it again",
                )
            }
            // A half-made box is left by an attempt that was cut short; making it again begins by clearing it away.
            (Some(Condition::Starting) | None, Progress::Accepted | Progress::Preparing) => Step::Prepare,
            (Some(Condition::Starting) | None, Progress::Starting) => Step::Start,
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

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
