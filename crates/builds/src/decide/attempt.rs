//! Beginning attempts, going from step to step, and giving the lease to another owner.

use std::time::Duration;

use sandglass_sandbox::Timestamp;

use super::Rules;
use crate::{
    build::{
        BuildState, Cancel, IllegalTransition, ImageBuild, Lease, Obligation, RecipeKind, StepName,
        StepRecord, StepState,
    },
    image::Image,
    key::ArtifactName,
    time::after,
};

/// Why an owner must not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Stopped {
    #[error("somebody else owns the build now")]
    Fenced,
    #[error("somebody wants the build to end")]
    Cancelled(Cancel),
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
}

/// The steps that a recipe needs.
pub fn steps(recipe: RecipeKind) -> &'static [StepName] {
    use StepName::{Build, Clone, Export, Resolve, Sanitize, Setup};
    match recipe {
        RecipeKind::Dockerfile => &[Resolve, Clone, Build, Sanitize, Export],
        RecipeKind::Devcontainer => &[Resolve, Clone, Build, Setup, Sanitize, Export],
        RecipeKind::Hooks => &[Resolve, Clone, Setup, Sanitize, Export],
        RecipeKind::None => &[Resolve, Clone, Sanitize, Export],
    }
}

/// The steps before the first attempt. What is to be built is known by then, so `resolve` is over.
pub fn fresh_steps(recipe: RecipeKind, now: Timestamp) -> Vec<StepRecord> {
    let record = |name: &StepName| {
        let over = *name == StepName::Resolve;
        StepRecord {
            name: *name,
            state: if over { StepState::Succeeded } else { StepState::Pending },
            started_at: over.then_some(now),
            finished_at: over.then_some(now),
            exit_code: None,
        }
    };
    steps(recipe).iter().map(record).collect()
}

/// The image to start from: the newest usable one of the lineage, if the build gains by it. A commit that has its image already is built
/// anew from the base, as is every so often what would pile up one layer on the other for ever.
pub fn parent<'i>(row: &ImageBuild, lineage: &'i [Image], rules: &Rules) -> Option<&'i Image> {
    let fits = |image: &&Image| image.usable() && image.platform == row.plan.platform;
    let newest = lineage.iter().filter(fits).max_by_key(|image| (image.created_at, image.id))?;
    let gains = row.plan.incremental && newest.key != row.slot.key;
    // One that could not be used for a sandbox is nothing to build on.
    (gains && newest.restore_failures == 0 && newest.increments < rules.increments).then_some(newest)
}

/// The row in its next attempt. The build sandbox is owed from here on.
///
/// # Errors
/// When it is not Queued, or somebody wants it to end.
pub fn begin(row: &ImageBuild, owner: &str, rules: &Rules, now: Timestamp) -> Result<ImageBuild, Stopped> {
    if let Some(why) = row.cancel {
        return Err(Stopped::Cancelled(why));
    }
    let mut next = row.becoming(BuildState::Running, now)?;
    next.attempt += 1;
    next.last_fence += 1;
    next.not_before = None;
    next.lease =
        Some(Lease { owner: owner.to_owned(), fence: next.last_fence, until: after(now, rules.lease) });
    next.steps = fresh_steps(row.plan.recipe.kind, now);
    next.obligations.push(Obligation::Workspace { attempt: next.attempt });
    // One budget for all attempts, so that retries do not multiply what was asked for.
    let started = *next.started_at.get_or_insert(now);
    next.deadline_at = after(started, Duration::from_secs(row.timeout_seconds));
    Ok(next)
}

/// The row with another owner, who finds out what became of its capture.
///
/// # Errors
/// Never, as the state stays.
pub fn take_over(row: &ImageBuild, owner: &str, rules: &Rules, now: Timestamp) -> ImageBuild {
    let mut next = row.clone();
    next.last_fence += 1;
    next.lease =
        Some(Lease { owner: owner.to_owned(), fence: next.last_fence, until: after(now, rules.lease) });
    next.deadline_at = after(now, rules.finalize_deadline);
    next
}

/// Whether the owner may go on.
///
/// # Errors
/// When the fence is not that of the lease, or somebody wants the build to end.
pub fn going_on(row: &ImageBuild, fence: u64) -> Result<(), Stopped> {
    if !row.held_by(fence) {
        return Err(Stopped::Fenced);
    }
    row.cancel.map_or(Ok(()), |why| Err(Stopped::Cancelled(why)))
}

/// The row with the lease renewed.
///
/// # Errors
/// As [`going_on`].
pub fn renew(row: &ImageBuild, fence: u64, rules: &Rules, now: Timestamp) -> Result<ImageBuild, Stopped> {
    going_on(row, fence)?;
    let mut next = row.clone();
    if let Some(lease) = &mut next.lease {
        lease.until = after(now, rules.lease);
    }
    Ok(next)
}

/// The row with the step under way.
///
/// # Errors
/// As [`going_on`].
pub fn step_began(
    row: &ImageBuild,
    fence: u64,
    step: StepName,
    now: Timestamp,
) -> Result<ImageBuild, Stopped> {
    going_on(row, fence)?;
    let mut next = row.clone();
    for record in next.steps.iter_mut().filter(|record| record.name == step) {
        record.state = StepState::Running;
        record.started_at = Some(now);
    }
    Ok(next)
}

/// The row with the step done.
///
/// # Errors
/// As [`going_on`].
pub fn step_done(
    row: &ImageBuild,
    fence: u64,
    step: StepName,
    now: Timestamp,
) -> Result<ImageBuild, Stopped> {
    going_on(row, fence)?;
    let mut next = row.clone();
    for record in next.steps.iter_mut().filter(|record| record.name == step) {
        record.state = StepState::Succeeded;
        record.finished_at = Some(now);
        record.exit_code = Some(0);
    }
    Ok(next)
}

/// The row that holds the image which its attempts start from; owed until it ended.
///
/// # Errors
/// As [`going_on`].
pub fn with_parent(
    row: &ImageBuild,
    fence: u64,
    image: sandglass_sandbox::ImageId,
) -> Result<ImageBuild, Stopped> {
    going_on(row, fence)?;
    let mut next = row.clone();
    next.parent_image = Some(image);
    next.obligations.push(Obligation::Parent { image });
    Ok(next)
}

/// The row that says under which name the artifact is about to be captured.
///
/// # Errors
/// As [`going_on`], or when no step ran.
pub fn finalizing(
    row: &ImageBuild,
    fence: u64,
    name: &ArtifactName,
    rules: &Rules,
    now: Timestamp,
) -> Result<ImageBuild, Stopped> {
    going_on(row, fence)?;
    // A name that was taken by somebody else is replaced within the state.
    let mut next = match row.state {
        BuildState::Finalizing => row.clone(),
        _ => {
            let mut next = row.becoming(BuildState::Finalizing, now)?;
            next.deadline_at = after(now, rules.finalize_deadline);
            next
        }
    };
    next.artifact = Some(name.clone());
    next.obligations.push(Obligation::Artifact { name: name.clone(), until: None });
    Ok(next)
}
