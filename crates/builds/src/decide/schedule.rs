//! Which waiting builds get their turn.

use std::collections::HashMap;

use sandglass_sandbox::{ImageBuildId, Timestamp};

use super::Rules;
use crate::build::{BuildState, ImageBuild};

/// What to do now, and when to look again if nothing happens before.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turns {
    pub start: Vec<ImageBuildId>,
    /// Waited too long.
    pub overdue: Vec<ImageBuildId>,
    pub next_at: Option<Timestamp>,
}

/// Decides. First come, first served within a priority; a tenant that has all it may have is passed over, not waited for.
///
/// `busy` is how many builds this host works on.
pub fn turns(rows: &[ImageBuild], busy: usize, rules: &Rules, now: Timestamp) -> Turns {
    let mut of_tenant: HashMap<Option<&str>, usize> = HashMap::new();
    for row in rows.iter().filter(|r| matches!(r.state, BuildState::Running | BuildState::Finalizing)) {
        *of_tenant.entry(row.slot.namespace.as_deref()).or_default() += 1;
    }
    let mut turns = Turns::default();
    let mut waiting: Vec<&ImageBuild> = rows.iter().filter(|r| r.state == BuildState::Queued).collect();
    waiting.sort_by_key(|row| (row.priority, row.queued_at, row.created_at, row.id));
    for row in waiting {
        if row.deadline_at <= now {
            turns.overdue.push(row.id);
            continue;
        }
        turns.look_at(row.deadline_at);
        if let Some(at) = row.not_before.filter(|at| *at > now) {
            turns.look_at(at);
            continue;
        }
        let mine = of_tenant.entry(row.slot.namespace.as_deref()).or_default();
        if busy + turns.start.len() < rules.per_host && *mine < rules.per_tenant {
            *mine += 1;
            turns.start.push(row.id);
        }
    }
    turns
}

impl Turns {
    fn look_at(&mut self, at: Timestamp) {
        self.next_at = Some(self.next_at.map_or(at, |before| before.min(at)));
    }
}
