//! Removing snapshots: `Deleting`, artifact, row. A removal that cannot be carried out leaves the snapshot as it was.

use std::sync::Arc;

use sandglass_sandbox::{
    SnapshotId,
    ports::{RuntimeErrorKind, runtime::RuntimeError, store::Advance},
    snapshot::{SnapshotRecord, SnapshotState},
};
use tracing::{info, warn};

use super::SnapshotError;
use crate::engine::Engine;

/// What became of the artifact.
enum Artifact {
    Gone,
    /// It is there and stays.
    Kept(SnapshotError),
    /// Nobody knows until the runtime can be asked.
    Unknown(SnapshotError),
}

impl Engine {
    /// Removes the snapshot and its artifact and returns when both are gone. Joins a removal in flight.
    ///
    /// # Errors
    /// When it is being made, in use, changed by somebody else, or the runtime fails; then it is as it was, except while the runtime is away:
    /// then it stays `Deleting` and is removed when the runtime is back.
    pub async fn delete_snapshot(self: &Arc<Self>, id: SnapshotId) -> Result<(), SnapshotError> {
        if self.store.snapshot(id).await?.is_none() {
            return Err(SnapshotError::NotFound);
        }
        let _removal = self.snapshots.removal(id).lock().await;
        if self.stopping.is_cancelled() {
            return Err(SnapshotError::Busy);
        }
        // It was there when this request began; if somebody else removed it since, that is what was wanted.
        let Some(record) = self.store.snapshot(id).await? else { return Ok(()) };
        if let Some(restore) = record.restore.as_ref().filter(|r| r.backend != self.runtime.name()) {
            let made_by =
                format!("it belongs to the {} runtime, which this server does not run", restore.backend);
            return Err(SnapshotError::InUse(made_by));
        }
        let (deleting, former) = match record.state {
            SnapshotState::Creating => return Err(SnapshotError::State(record.state)),
            // Left by a removal that was cut short.
            SnapshotState::Deleting => (record, None),
            SnapshotState::Ready | SnapshotState::Failed => {
                (self.begin_removal(&record).await?, Some(record))
            }
        };
        self.remove_artifact(&deleting, former.as_ref()).await
    }

    /// Moves the row to `Deleting`, unless a sandbox is made from it or is about to be.
    async fn begin_removal(&self, record: &SnapshotRecord) -> Result<SnapshotRecord, SnapshotError> {
        let _gate = self.snapshots.gate(record.id).lock().await;
        if self.index.restored_from(record.id) {
            return Err(SnapshotError::InUse("a sandbox is made from it".to_owned()));
        }
        let deleting = self.next_snapshot(record, SnapshotState::Deleting, "snapshot_delete_requested", None);
        match self.store.advance_snapshot(record.state, &deleting).await {
            Ok(Advance::Written) => Ok(deleting),
            Ok(Advance::Lost) => Err(SnapshotError::Changed),
            Err(error) => {
                // It may be written all the same.
                self.snapshots.look();
                Err(error.into())
            }
        }
    }

    /// With the row in `Deleting` and the removal lock held.
    pub(super) async fn remove_artifact(
        &self,
        deleting: &SnapshotRecord,
        former: Option<&SnapshotRecord>,
    ) -> Result<(), SnapshotError> {
        let id = deleting.id;
        match self.artifact_after_removal(id, former).await {
            Artifact::Gone => match self.store.delete_snapshot(id, SnapshotState::Deleting).await {
                Ok(Advance::Written) => {
                    info!(snapshot = %id, "snapshot removed");
                    Ok(())
                }
                Ok(Advance::Lost) if self.store.snapshot(id).await?.is_none() => Ok(()),
                Ok(Advance::Lost) => Err(SnapshotError::Changed),
                Err(error) => {
                    self.snapshots.look();
                    Err(error.into())
                }
            },
            Artifact::Kept(why) => {
                let back = match former {
                    Some(former) => former.clone(),
                    // What it was before the crash is not known; that it can be restored from is.
                    None => {
                        self.next_snapshot(deleting, SnapshotState::Ready, "snapshot_recovery_ready", None)
                    }
                };
                if let Err(error) = self.store.advance_snapshot(SnapshotState::Deleting, &back).await {
                    warn!(snapshot = %id, %error, "the snapshot could not be put back; trying again");
                    self.snapshots.look();
                }
                Err(why)
            }
            Artifact::Unknown(why) => {
                self.snapshots.look();
                Err(why)
            }
        }
    }

    async fn artifact_after_removal(&self, id: SnapshotId, former: Option<&SnapshotRecord>) -> Artifact {
        let error = match self.in_time(self.runtime.remove_snapshot(id)).await {
            Ok(()) => return Artifact::Gone,
            Err(error) if error.kind == RuntimeErrorKind::InUse => {
                return Artifact::Kept(SnapshotError::InUse(error.message));
            }
            Err(error) => error,
        };
        warn!(snapshot = %id, %error, "the artifact of a snapshot could not be removed");
        // An answer that is an error says nothing about what was done: look.
        let found = self.in_time(self.runtime.has_snapshot(id)).await;
        let why = failed(error);
        match (found, former) {
            (Ok(false), _) => Artifact::Gone,
            (Ok(true), Some(_)) => Artifact::Kept(why),
            // A removal that was accepted before a crash goes on until it succeeds.
            (Ok(true), None) | (Err(_), _) => Artifact::Unknown(why),
        }
    }
}

fn failed(error: RuntimeError) -> SnapshotError {
    let away = error.kind == RuntimeErrorKind::Unavailable;
    let error = Arc::new(error);
    if away { SnapshotError::Unreachable(error) } else { SnapshotError::RemoveFailed(error) }
}
