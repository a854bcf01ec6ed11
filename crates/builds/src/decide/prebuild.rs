//! When prebuilds look at their remotes, and what they do about what they see.

use std::time::Duration;

use sandglass_sandbox::Timestamp;

use super::Rules;
use crate::{
    build::{BuildState, CauseKind, ImageBuild},
    key::BuildKey,
    prebuild::{Answered, Prebuild, Seen},
    time::after,
};

/// When the next look is due; `None`: not before somebody asks or pushes.
pub fn due_at(prebuild: &Prebuild, rules: &Rules) -> Option<Timestamp> {
    let schedule = &prebuild.schedule;
    let push = schedule.pushed_at.filter(|_| schedule.pushes.pending());
    let due = if schedule.requests.pending() {
        Some(prebuild.created_at)
    } else if !prebuild.enabled {
        None
    } else {
        let push = push.map(|at| after(at, rules.push_window));
        push.into_iter().chain(schedule.next_poll_at).min()
    };
    due.map(|at| schedule.looking_until.map_or(at, |until| until.max(at)))
}

/// The row after a push: the first one starts the window, later ones are answered with it.
pub fn pushed(prebuild: &Prebuild, now: Timestamp) -> Prebuild {
    let mut next = prebuild.clone();
    if !next.schedule.pushes.pending() {
        next.schedule.pushed_at = Some(now);
    }
    next.schedule.pushes.seen += 1;
    next
}

/// The row when somebody asks for a look at once.
pub fn requested(prebuild: &Prebuild) -> Prebuild {
    let mut next = prebuild.clone();
    next.schedule.requests.seen += 1;
    next
}

/// What a look answers: the pushes and requests of when it began.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Look {
    pushes: u64,
    requests: u64,
    /// Somebody asked, so a commit that failed before is tried again.
    pub asked: bool,
}

/// The row with a look begun, so that nobody else begins one for the `patience`, and the look.
pub fn look_began(prebuild: &Prebuild, patience: Duration, now: Timestamp) -> (Prebuild, Look) {
    let mut next = prebuild.clone();
    next.schedule.looking_until = Some(after(now, patience));
    let Answered { seen: pushes, .. } = next.schedule.pushes;
    let requests = next.schedule.requests;
    (next, Look { pushes, requests: requests.seen, asked: requests.pending() })
}

/// The row with the look over and the next poll set. What came meanwhile is for another look, as this one may have read the remote before.
///
/// `chance` is anything between 0 and 999, evenly spread.
pub fn look_ended(prebuild: &Prebuild, look: Look, rules: &Rules, chance: u32, now: Timestamp) -> Prebuild {
    let mut next = prebuild.clone();
    let schedule = &mut next.schedule;
    schedule.next_poll_at = prebuild.poll_seconds.map(|seconds| after(now, spread(seconds, rules, chance)));
    schedule.looking_until = None;
    schedule.pushes.answered = schedule.pushes.answered.max(look.pushes);
    schedule.requests.answered = schedule.requests.answered.max(look.requests);
    schedule.pushed_at = schedule.pushes.pending().then_some(now);
    next
}

/// No interval is longer, whatever the row says: what is added to it must have room.
const LONGEST: u64 = 366 * 86_400;

/// The interval, up to the jitter's share shorter or longer.
fn spread(seconds: u64, rules: &Rules, chance: u32) -> Duration {
    let interval = Duration::from_secs(seconds.clamp(1, LONGEST));
    let jitter = interval * rules.poll_jitter_percent / 100;
    interval.saturating_sub(jitter) + jitter * 2 * chance.min(999) / 999
}

/// What to do about a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    /// Ask for its image: it is new, or its image may be gone.
    Build,
    /// Its build failed by fault of the repository, or somebody cancelled it: wait for another commit.
    Nothing,
}

/// Decides. `last` is the build that was begun for the commit seen last, if there is still a row of it.
pub fn wanted(prebuild: &Prebuild, key: &BuildKey, last: Option<&ImageBuild>, asked: bool) -> Wanted {
    let known = prebuild.seen.as_ref().is_some_and(|seen| seen.key == *key);
    if !known || asked {
        return Wanted::Build;
    }
    let Some(last) = last else { return Wanted::Build };
    let passing = |kind| {
        matches!(
            kind,
            CauseKind::Unavailable | CauseKind::Interrupted | CauseKind::SecretsLost | CauseKind::CaptureLost
        )
    };
    match last.state {
        BuildState::Failed if last.cause.as_ref().is_some_and(|cause| passing(cause.kind)) => Wanted::Build,
        BuildState::Failed | BuildState::TimedOut | BuildState::Cancelled => Wanted::Nothing,
        // Superseded: the remote went back to it.
        _ => Wanted::Build,
    }
}

/// The row after a look that read the remote.
pub fn saw(prebuild: &Prebuild, seen: Seen) -> Prebuild {
    // A look that only found its image there does not forget which build made it.
    let build = match &prebuild.seen {
        Some(before) if before.key == seen.key => seen.build.or(before.build),
        _ => seen.build,
    };
    Prebuild { seen: Some(Seen { build, ..seen }), last_error: None, ..prebuild.clone() }
}

/// The row after a look that could not read the remote: neither built nor disabled, asked again when the next look is due.
pub fn unreadable(prebuild: &Prebuild, error: String) -> Prebuild {
    Prebuild { last_error: Some(error), ..prebuild.clone() }
}
