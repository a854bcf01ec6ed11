//! Who waits for a build, and what becomes of it when they leave.

use crate::build::{BuildState, Cancel, IllegalTransition, ImageBuild};
use sandglass_sandbox::Timestamp;

use super::ending;
use crate::build::{Cause, Priority};

/// Somebody joins a build that is under way.
#[derive(Debug, Clone, Default)]
pub struct Joining {
    pub waiter: Option<String>,
    /// Whether the one who joins wants it whoever waits.
    pub independent: bool,
    pub priority: Option<Priority>,
    pub tags: std::collections::BTreeSet<crate::key::TagName>,
}

/// The row with them, or `None` when the build cannot be joined any more.
pub fn join(row: &ImageBuild, joining: &Joining) -> Option<ImageBuild> {
    if row.state.terminal() || row.cancel.is_some() {
        return None;
    }
    let mut next = row.clone();
    next.waiters.extend(joining.waiter.clone());
    next.independent |= joining.independent;
    next.priority = joining.priority.map_or(row.priority, |priority| priority.min(row.priority));
    next.tags.extend(joining.tags.iter().cloned());
    Some(next)
}

/// The row without the waiter, cancelled if nobody wants it any more; `None` when it did not wait.
///
/// # Errors
/// Never by the table as it is.
pub fn leave(
    row: &ImageBuild,
    waiter: &str,
    now: Timestamp,
) -> Result<Option<ImageBuild>, IllegalTransition> {
    let mut next = row.clone();
    if row.state.terminal() || !next.waiters.remove(waiter) {
        return Ok(None);
    }
    if next.waiters.is_empty() && !next.independent {
        return cancel(&next, Cancel::LastWaiterLeft, now).map(Some);
    }
    Ok(Some(next))
}

/// The row with the wish that it ends. Without an owner it ends at once; the first wish stays.
///
/// # Errors
/// When it ended already.
pub fn cancel(row: &ImageBuild, why: Cancel, now: Timestamp) -> Result<ImageBuild, IllegalTransition> {
    let mut next = row.clone();
    let why = *next.cancel.get_or_insert(why);
    if row.state == BuildState::Queued || row.state.terminal() {
        return ending::ended(&next, why.ends_in(), Cause::cancelled(why), now);
    }
    Ok(next)
}

/// Whether the build of a newer commit makes this one pointless: it was begun by the same prebuild, and nobody waits for it.
pub fn superseded_by(row: &ImageBuild, newer: &ImageBuild) -> bool {
    row.id != newer.id
        && row.origin == newer.origin
        && matches!(row.origin, crate::build::Origin::Prebuild(_))
        && row.slot.key != newer.slot.key
        && row.waiters.is_empty()
        && row.priority == Priority::Prebuild
        && row.cancel.is_none()
        && matches!(row.state, BuildState::Queued | BuildState::Running)
}
