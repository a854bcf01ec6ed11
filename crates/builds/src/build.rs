//! Builds: the record the server owns, its states and the one table of their transitions.

use std::collections::{BTreeMap, BTreeSet};

use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId, Timestamp};
use serde::{Deserialize, Serialize};

pub use crate::build_parts::{
    Cancel, Cause, CauseKind, Checkout, IllegalTransition, Lease, Obligation, Plan, Priority, Recipe,
    RecipeKind, Slot, StepName, StepRecord, StepState,
};
use crate::{
    image::Lineage,
    key::{ArtifactName, RecipeKey, TagName},
};

/// Where a build stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum BuildState {
    /// Waits for its turn, or for its next attempt.
    Queued,
    /// One of its steps runs.
    Running,
    /// The artifact is being captured and accepted.
    Finalizing,
    Succeeded,
    Failed,
    Cancelled,
    TimedOut,
    /// A newer commit made it pointless.
    Superseded,
}

impl BuildState {
    /// Every state, in the order of a build's life.
    pub const ALL: [Self; 8] = [
        Self::Queued,
        Self::Running,
        Self::Finalizing,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
        Self::TimedOut,
        Self::Superseded,
    ];

    /// The word on the wire and in the store.
    pub fn word(self) -> &'static str {
        match self {
            Self::Queued => "Queued",
            Self::Running => "Running",
            Self::Finalizing => "Finalizing",
            Self::Succeeded => "Succeeded",
            Self::Failed => "Failed",
            Self::Cancelled => "Cancelled",
            Self::TimedOut => "TimedOut",
            Self::Superseded => "Superseded",
        }
    }

    /// The state of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }

    /// Nothing happens to it any more, except that what it left is removed.
    pub fn terminal(self) -> bool {
        !matches!(self, Self::Queued | Self::Running | Self::Finalizing)
    }

    /// The table of legal transitions. `Running` goes back to `Queued` for its next attempt; `Finalizing` never does, because a capture
    /// whose outcome is not known is not repeated.
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (
                Self::Queued,
                Self::Running | Self::Failed | Self::Cancelled | Self::TimedOut | Self::Superseded
            ) | (
                Self::Running,
                Self::Queued
                    | Self::Finalizing
                    | Self::Failed
                    | Self::Cancelled
                    | Self::TimedOut
                    | Self::Superseded
            ) | (
                Self::Finalizing,
                // Back when its server ended before it captured anything.
                Self::Queued
                    | Self::Succeeded
                    | Self::Failed
                    | Self::Cancelled
                    | Self::TimedOut
                    | Self::Superseded
            )
        )
    }
}

/// Who asked first, and so how long the build is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Origin {
    /// A request for the build itself: it runs whoever waits.
    Explicit,
    /// A sandbox that waits for it: nobody wants it when the last waiter left.
    Sandbox,
    /// A sandbox that started from an older commit's image.
    Refresh,
    Prebuild(PrebuildId),
}

impl Origin {
    /// Whether the build goes on without waiters.
    pub fn independent(self) -> bool {
        !matches!(self, Self::Sandbox)
    }

    /// Somebody waits at a screen, or nobody does.
    pub fn priority(self) -> Priority {
        match self {
            Self::Explicit | Self::Sandbox => Priority::Interactive,
            Self::Refresh | Self::Prebuild(_) => Priority::Prebuild,
        }
    }
}

/// One build as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuild {
    pub id: ImageBuildId,
    /// Grows with every write.
    pub version: u64,
    pub slot: Slot,
    pub recipe_key: RecipeKey,
    pub plan: Plan,
    pub origin: Origin,
    /// Goes on without waiters. Set later when a request for the build itself joins.
    pub independent: bool,
    pub priority: Priority,
    /// Moved to the image when there is one.
    pub tags: BTreeSet<TagName>,
    pub metadata: BTreeMap<String, String>,
    /// How long all attempts together may take, in seconds.
    pub timeout_seconds: u64,

    pub state: BuildState,
    pub cause: Option<Cause>,
    pub last_transition_at: Timestamp,
    /// Who waits for the image, by the names under which they will use it.
    pub waiters: BTreeSet<String>,
    /// Somebody wants it to end; honoured by its owner.
    pub cancel: Option<Cancel>,

    /// Attempts begun; the first is 1.
    pub attempt: u32,
    /// Attempts that failed by no fault of the user.
    pub transient_failures: u32,
    /// Attempts cut off by the end of their server.
    pub interruptions: u32,
    /// Not to be started before.
    pub not_before: Option<Timestamp>,
    pub lease: Option<Lease>,
    /// Last fence given out; a new owner gets a higher one.
    pub last_fence: u64,
    pub steps: Vec<StepRecord>,
    pub parent_image: Option<ImageId>,
    /// The name of the artifact that the current attempt captures.
    pub artifact: Option<ArtifactName>,
    pub image: Option<ImageId>,
    /// What has to be undone in the world, written before it is done.
    pub obligations: Vec<Obligation>,

    pub created_at: Timestamp,
    /// Its place in the queue, which it keeps over its attempts.
    pub queued_at: Timestamp,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    /// When the current state ends for certain.
    pub deadline_at: Timestamp,
}

impl ImageBuild {
    pub fn lineage(&self) -> Lineage {
        Lineage {
            namespace: self.slot.namespace.clone(),
            runtime: self.slot.runtime.clone(),
            recipe_key: self.recipe_key.clone(),
        }
    }

    /// The record in its next state: the only place where the state changes.
    ///
    /// # Errors
    /// When the table does not allow it.
    pub fn becoming(&self, next: BuildState, now: Timestamp) -> Result<Self, IllegalTransition> {
        if !self.state.may_become(next) {
            return Err(IllegalTransition { what: "image build", from: self.state.word(), to: next.word() });
        }
        let mut row = self.clone();
        row.state = next;
        row.last_transition_at = now;
        if next.terminal() {
            row.finished_at = Some(now);
            row.lease = None;
            row.not_before = None;
            row.waiters.clear();
            end_steps(&mut row.steps, next, now);
        }
        Ok(row)
    }

    /// Whether the writer with this fence still owns the build.
    pub fn held_by(&self, fence: u64) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.fence == fence)
    }

    /// The step that runs, if any.
    pub fn current_step(&self) -> Option<StepName> {
        self.steps.iter().find(|s| s.state == StepState::Running).map(|s| s.name)
    }
}

/// A step that runs when its build ends ended with it; those after it are not needed.
fn end_steps(steps: &mut [StepRecord], ended: BuildState, now: Timestamp) {
    for step in steps {
        match step.state {
            StepState::Running => {
                step.state = if ended == BuildState::Failed || ended == BuildState::TimedOut {
                    StepState::Failed
                } else {
                    StepState::Cancelled
                };
                step.finished_at = Some(now);
            }
            StepState::Pending => step.state = StepState::Skipped,
            StepState::Succeeded | StepState::Failed | StepState::Cancelled | StepState::Skipped => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_transitions() {
        let table: Vec<String> = BuildState::ALL
            .into_iter()
            .map(|from| {
                let to: Vec<_> = BuildState::ALL
                    .into_iter()
                    .filter(|to| from.may_become(*to))
                    .map(BuildState::word)
                    .collect();
                format!("{} -> {}", from.word(), to.join(" ")).trim_end().to_owned()
            })
            .collect();
        assert_eq!(
            table,
            [
                "Queued -> Running Failed Cancelled TimedOut Superseded",
                "Running -> Queued Finalizing Failed Cancelled TimedOut Superseded",
                "Finalizing -> Queued Succeeded Failed Cancelled TimedOut Superseded",
                "Succeeded ->",
                "Failed ->",
                "Cancelled ->",
                "TimedOut ->",
                "Superseded ->",
            ]
        );
        assert!(BuildState::ALL.into_iter().all(|s| BuildState::of_word(s.word()) == Some(s)));
    }
}
