//! Snapshots: the record the server owns, its states and the one table of their transitions.
//!
//! The artifact (an image, a directory) belongs to the runtime; the record says how to find it again.

use serde::{Deserialize, Serialize};

use crate::{
    ids::{SandboxId, SnapshotId},
    time::Timestamp,
};

/// Where a snapshot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum SnapshotState {
    Creating,
    Ready,
    Failed,
    Deleting,
}

impl SnapshotState {
    /// Every state.
    pub const ALL: [Self; 4] = [Self::Creating, Self::Ready, Self::Failed, Self::Deleting];

    /// The word on the wire and in the store.
    pub fn word(self) -> &'static str {
        match self {
            Self::Creating => "Creating",
            Self::Ready => "Ready",
            Self::Failed => "Failed",
            Self::Deleting => "Deleting",
        }
    }

    /// The state of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }

    /// The table of legal transitions. `Deleting` goes back to where it came from when the artifact is in use, so that
    /// an honest retry or restore stays possible.
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Creating, Self::Ready | Self::Failed)
                | (Self::Ready | Self::Failed, Self::Deleting)
                | (Self::Deleting, Self::Ready | Self::Failed)
        )
    }
}

/// How a snapshot is restored: which backend made it, and what to hand it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreConfig {
    /// [`crate::ports::Runtime::name`] of the runtime that made it.
    pub backend: String,
    /// What that runtime takes as the image of a new sandbox.
    pub image: String,
}

/// One snapshot as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotRecord {
    pub id: SnapshotId,
    pub source: SandboxId,
    /// The tenant's namespace; `None` on a server without tenants.
    pub namespace: Option<String>,
    pub name: Option<String>,
    pub description: Option<String>,
    /// Present as soon as the artifact's name is known, which may be before it exists.
    pub restore: Option<RestoreConfig>,
    pub state: SnapshotState,
    /// Stable lower-case word, e.g. `snapshot_runtime_ready`.
    pub reason: String,
    pub message: Option<String>,
    pub last_transition_at: Timestamp,
    pub created_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_transitions() {
        let table: Vec<String> = SnapshotState::ALL
            .into_iter()
            .map(|from| {
                let to: Vec<_> = SnapshotState::ALL
                    .into_iter()
                    .filter(|to| from.may_become(*to))
                    .map(SnapshotState::word)
                    .collect();
                format!("{} -> {}", from.word(), to.join(" "))
            })
            .collect();
        assert_eq!(
            table,
            [
                "Creating -> Ready Failed",
                "Ready -> Deleting",
                "Failed -> Deleting",
                "Deleting -> Ready Failed"
            ]
        );
        assert!(SnapshotState::ALL.into_iter().all(|s| SnapshotState::of_word(s.word()) == Some(s)));
    }
}
