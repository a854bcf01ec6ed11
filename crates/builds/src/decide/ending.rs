//! How attempts end: accepted, tried again, or for good; and what is remembered of failures.

use std::time::Duration;

use sandglass_sandbox::{ImageId, Timestamp};

use super::{
    Rules,
    attempt::{Stopped, going_on},
    rules::doubled,
};
use crate::{
    build::{
        BuildState, Cancel, Cause, CauseKind, IllegalTransition, ImageBuild, Obligation, StepName, StepState,
    },
    image::{Image, ImageState, Removal, Tag},
    ports::{Artifact, EngineError, Negative, NegativeChange, NewImage},
    time::after,
};

/// How an attempt ended, as its owner saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// A step, or a capture that surely did not happen, failed.
    Failed {
        step: Option<StepName>,
        error: EngineError,
    },
    /// The capture may or may not have happened, and what is under its name could not be told, or is not ours.
    CaptureLost(String),
    /// The answer of the capture was lost, and nothing came to be under its name.
    CaptureAbsent(String),
    Cancelled(Cancel),
    PastDeadline,
    /// The owner ended before the attempt did.
    Interrupted,
    SecretsLost,
}

/// A row and what the store is to remember with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ending {
    pub row: ImageBuild,
    pub negative: Option<NegativeChange>,
}

/// The row in a final state.
///
/// # Errors
/// When the table does not allow it.
pub fn ended(
    row: &ImageBuild,
    state: BuildState,
    cause: Cause,
    now: Timestamp,
) -> Result<ImageBuild, IllegalTransition> {
    let mut next = row.becoming(state, now)?;
    next.cause = Some(cause);
    Ok(next)
}

/// What follows from the outcome. A user's failure is final at once; what may pass is tried again within bounds and before the deadline.
///
/// # Errors
/// When the table does not allow it.
pub fn after_attempt(
    row: &ImageBuild,
    outcome: &Outcome,
    negative: Option<&Negative>,
    rules: &Rules,
    now: Timestamp,
) -> Result<Ending, IllegalTransition> {
    // A wish to end goes before everything that the end would otherwise be called.
    let wished = row.cancel.map(Outcome::Cancelled);
    let outcome = wished.as_ref().unwrap_or(outcome);
    let (state, cause) = match outcome {
        Outcome::Cancelled(why) => (why.ends_in(), Cause::cancelled(*why)),
        Outcome::PastDeadline => {
            (BuildState::TimedOut, Cause { step: row.current_step(), ..past_deadline(row) })
        }
        Outcome::CaptureLost(why) | Outcome::CaptureAbsent(why) => {
            (BuildState::Failed, Cause::new(CauseKind::CaptureLost, why.clone()))
        }
        Outcome::SecretsLost => {
            (BuildState::Failed, Cause::new(CauseKind::SecretsLost, "the server that knew its secrets ended"))
        }
        Outcome::Interrupted => {
            let cut_off = matches!(row.state, BuildState::Running | BuildState::Finalizing);
            if cut_off && row.interruptions < rules.interruptions {
                return Ok(Ending { row: again_after_interruption(row, rules, now)?, negative: None });
            }
            let message = format!("its server ended {} times meanwhile", row.interruptions + 1);
            (BuildState::Failed, Cause::new(CauseKind::Interrupted, message))
        }
        Outcome::Failed { step, error } => {
            if let Some(wait) = retry_after(row, error, rules)
                && row.state == BuildState::Running
                && after(now, wait) < row.deadline_at
            {
                return Ok(Ending { row: again(row, wait, now)?, negative: None });
            }
            (BuildState::Failed, cause_of(row, *step, error))
        }
    };
    let negative =
        cause.kind.sticks().then(|| NegativeChange::Remember(remember(row, &cause, negative, rules, now)));
    let mut row = ended(row, state, cause, now)?;
    owe_late_artifacts(&mut row, rules, now);
    if let Some(cause) = &row.cause
        && let Some(step) = cause.step
    {
        let code = cause.exit_code;
        row.steps.iter_mut().filter(|s| s.name == step).for_each(|s| s.exit_code = code);
    }
    Ok(Ending { row, negative })
}

/// How long to wait before the failed call is tried again; `None` when that is pointless or was done often enough.
pub fn retry_after(row: &ImageBuild, error: &EngineError, rules: &Rules) -> Option<Duration> {
    let asked = match error {
        EngineError::User(_) | EngineError::Rejected(_) => return None,
        EngineError::Transient { retry_after, .. } => *retry_after,
        // What is found missing, in the way or unknown within an attempt's own workspace is gone with the workspace.
        EngineError::NotFound(_)
        | EngineError::Conflict(_)
        | EngineError::Ambiguous(_)
        | EngineError::Cancelled => None,
    };
    let wait = doubled(rules.back_off, row.transient_failures, Duration::from_secs(300));
    (row.transient_failures < rules.retries).then(|| asked.unwrap_or(wait).max(wait))
}

/// The row accepted, and its image. Who waited holds it.
///
/// # Errors
/// When somebody else owns the build, or wants it to end.
pub fn accepted(
    row: &ImageBuild,
    fence: u64,
    artifact: &Artifact,
    lineage: &[Image],
    now: Timestamp,
) -> Result<(ImageBuild, NewImage), Stopped> {
    going_on(row, fence)?;
    let id = ImageId::random();
    let mut next = row.becoming(BuildState::Succeeded, now)?;
    next.image = Some(id);
    next.obligations
        .retain(|owed| !matches!(owed, Obligation::Artifact { name, .. } if *name == artifact.name));
    let live = lineage.iter().filter(|image| image.state == ImageState::Ready);
    // A build that was asked for later knows the newer commit, also when it ended first.
    let (newer, older): (Vec<_>, Vec<_>) = live.partition(|image| image.created_at > row.created_at);
    let state = if newer.is_empty() { ImageState::Ready } else { ImageState::Superseded };
    // Held until the build ended, so it is among them.
    let parent = row.parent_image.and_then(|id| lineage.iter().find(|image| image.id == id));
    let image = Image {
        id,
        version: 1,
        lineage: row.lineage(),
        key: row.slot.key.clone(),
        repository_key: row.plan.repository_key.clone(),
        artifact: artifact.name.clone(),
        reference: artifact.reference.clone(),
        digest: artifact.digest.clone(),
        size_bytes: artifact.size_bytes,
        checkouts: row.plan.checkouts.clone(),
        agent_generation: row.plan.agent_generation,
        platform: row.plan.platform.clone(),
        state,
        blocked: false,
        image_build_id: row.id,
        holders: row.waiters.len() as u64,
        tags: row.tags.iter().cloned().collect(),
        restore_failures: 0,
        increments: parent.map_or(0, |parent| parent.increments.saturating_add(1)),
        removal: Removal::default(),
        // Of the request, not of the end: images compare by what their commits were known at.
        created_at: row.created_at,
        last_used_at: now,
    };
    let tag = |name: &crate::key::TagName| Tag {
        namespace: row.slot.namespace.clone(),
        repository_key: row.plan.repository_key.clone(),
        name: name.clone(),
        image: id,
        moved_at: now,
    };
    let new = NewImage {
        image,
        holders: row.waiters.iter().cloned().collect(),
        tags: row.tags.iter().map(tag).collect(),
        supersedes: older.iter().map(|image| image.id).collect(),
    };
    Ok((next, new))
}

fn again(row: &ImageBuild, wait: Duration, now: Timestamp) -> Result<ImageBuild, IllegalTransition> {
    let mut next = requeued(row, now)?;
    next.transient_failures += 1;
    next.not_before = Some(after(now, wait));
    Ok(next)
}

/// Time that no server ran is not the build's, so both its deadlines begin anew.
fn again_after_interruption(
    row: &ImageBuild,
    rules: &Rules,
    now: Timestamp,
) -> Result<ImageBuild, IllegalTransition> {
    let mut next = requeued(row, now)?;
    // An engine may go on with what its server began.
    owe_late_artifacts(&mut next, rules, now);
    next.interruptions += 1;
    next.started_at = None;
    next.deadline_at = after(now, rules.queue_deadline);
    Ok(next)
}

fn requeued(row: &ImageBuild, now: Timestamp) -> Result<ImageBuild, IllegalTransition> {
    let mut next = row.becoming(BuildState::Queued, now)?;
    next.lease = None;
    next.artifact = None;
    // Its place in the queue is that of its first request: it does not go behind those who came later.
    for step in &mut next.steps {
        if step.state == StepState::Running {
            step.state = StepState::Failed;
            step.finished_at = Some(now);
        }
    }
    Ok(next)
}

/// An artifact whose capture was given up may still come to exist for a while.
fn owe_late_artifacts(row: &mut ImageBuild, rules: &Rules, now: Timestamp) {
    let settled = after(now, rules.capture_settle);
    for owed in &mut row.obligations {
        if let Obligation::Artifact { until, .. } = owed {
            until.get_or_insert(settled);
        }
    }
}

fn past_deadline(row: &ImageBuild) -> Cause {
    match row.state {
        BuildState::Queued if row.attempt == 0 => {
            Cause::new(CauseKind::TimedOut, "the build did not get its turn in time")
        }
        BuildState::Finalizing => Cause::new(CauseKind::TimedOut, "the image was not captured in time"),
        _ => Cause::timed_out(Duration::from_secs(row.timeout_seconds)),
    }
}

fn cause_of(row: &ImageBuild, step: Option<StepName>, error: &EngineError) -> Cause {
    match error {
        EngineError::User(failure) => Cause {
            step: Some(failure.step),
            exit_code: failure.exit_code,
            ..Cause::new(CauseKind::UserFailure, error.to_string())
        },
        EngineError::Rejected(_) => Cause { step, ..Cause::new(CauseKind::Rejected, error.to_string()) },
        _ => {
            let message = format!("attempt {} failed like those before: {error}", row.attempt);
            Cause { step, ..Cause::new(CauseKind::Unavailable, message) }
        }
    }
}

/// 60 s the first time, doubled for each failure in a row, at most 15 min.
fn remember(
    row: &ImageBuild,
    cause: &Cause,
    before: Option<&Negative>,
    rules: &Rules,
    now: Timestamp,
) -> Negative {
    let in_a_row = before.filter(|n| now < after(n.until, rules.negative_memory)).map_or(0, |n| n.failures);
    let wait = doubled(rules.negative_first, in_a_row, rules.negative_most);
    Negative {
        slot: row.slot.clone(),
        build: row.id,
        cause: cause.clone(),
        failures: in_a_row + 1,
        until: after(now, wait),
    }
}
