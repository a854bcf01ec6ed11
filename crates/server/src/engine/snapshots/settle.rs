//! Work for this loop: rows that nobody ends, because the server died, the runtime was away or the store failed. Not its work: what a worker or a
//! request of this process is at. Twice at once: every write is conditional. Idle cost: none; it sleeps until a start, a runtime that came back, or
//! somebody who left something.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    ports::StoreError,
    snapshot::{RestoreConfig, SnapshotRecord, SnapshotState},
};
use tracing::{info, warn};

use crate::engine::Engine;

/// What came of looking at a snapshot that was being made.
enum Conclusion {
    Written,
    /// The runtime cannot tell.
    NotNow,
    StillMade,
}

/// Starts the workers and the loop.
pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    super::work::spawn(engine);
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            let again = engine_.settle().await.unwrap_or_else(|error| {
                warn!(%error, "the snapshots cannot be looked through; trying again");
                Some(engine_.settings.remove_retry)
            });
            let later = async {
                match again {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = later => {}
                () = engine_.snapshots.left.notified() => {
                    // What was just left fails again if it is tried at once.
                    tokio::select! {
                        () = tokio::time::sleep(super::LOOK_PAUSE) => {}
                        () = stopping.cancelled() => return,
                    }
                }
                () = stopping.cancelled() => return,
            }
        }
    });
}

impl Engine {
    /// Ends what can be ended; after which time to look at what is left.
    async fn settle(self: &Arc<Self>) -> Result<Option<Duration>, StoreError> {
        let mut left = false;
        let mut awaited = false;
        for record in self.store.snapshots_in(SnapshotState::Creating).await? {
            if self.snapshots.mine().contains(&record.id) {
                continue;
            }
            match self.conclude(&record).await? {
                Conclusion::Written => {}
                Conclusion::NotNow => left = true,
                Conclusion::StillMade => awaited = true,
            }
        }
        for record in self.store.snapshots_in(SnapshotState::Deleting).await? {
            if record.restore.as_ref().is_some_and(|r| r.backend != self.runtime.name()) {
                // Only the runtime that made it can remove it.
                continue;
            }
            // Somebody is at it, and says so if it is left after all.
            let Ok(_removal) = self.snapshots.removal(record.id).try_lock() else { continue };
            let deleting = self.store.snapshot(record.id).await?;
            let Some(deleting) = deleting.filter(|r| r.state == SnapshotState::Deleting) else { continue };
            if let Err(error) = self.remove_artifact(&deleting, None).await {
                info!(snapshot = %record.id, %error, "the removal of a snapshot is not over");
                let now = self.store.snapshot(record.id).await?;
                left |= now.is_some_and(|r| r.state == SnapshotState::Deleting);
            }
        }
        let pause = if awaited { super::LOOK_PAUSE } else { self.settings.remove_retry };
        Ok((left || awaited).then_some(pause))
    }

    /// Finds out what became of a snapshot that was being made.
    async fn conclude(&self, record: &SnapshotRecord) -> Result<Conclusion, StoreError> {
        use SnapshotState::{Failed, Ready};
        let foreign = record.restore.as_ref().is_some_and(|r| r.backend != self.runtime.name());
        let (state, reason, message) = if foreign || !self.runtime.capabilities().snapshot {
            let message = "the runtime that was making it is not the one this server runs";
            (Failed, "snapshot_recovery_failed", Some(message.to_owned()))
        } else {
            match self.in_time(self.runtime.has_snapshot(record.id)).await {
                Ok(true) => (Ready, "snapshot_recovery_ready", None),
                Ok(false) if self.still_made(record).await => return Ok(Conclusion::StillMade),
                Ok(false) => {
                    let message = "the server ended before the snapshot was made";
                    (Failed, "snapshot_recovery_missing_image", Some(message.to_owned()))
                }
                Err(error) if error.retryable() => return Ok(Conclusion::NotNow),
                Err(error) => (Failed, "snapshot_recovery_inspect_failed", Some(error.to_string())),
            }
        };
        info!(snapshot = %record.id, reason, "an interrupted snapshot was found");
        let mut next = self.next_snapshot(record, state, reason, message);
        if state == Ready && next.restore.is_none() {
            let image = self.runtime.snapshot_image(record.id);
            next.restore = Some(RestoreConfig { backend: self.runtime.name().to_owned(), image });
        }
        let told = format!("{} {} {reason}", record.id, state.word());
        self.store.advance_snapshot(SnapshotState::Creating, &next).await?;
        if self.index.get(record.source).is_some() {
            self.note(record.source, "snapshot_finished", &told).await;
        }
        Ok(Conclusion::Written)
    }

    /// A runtime goes on for a killed server. The deadline of the snapshot ends the wait.
    async fn still_made(&self, record: &SnapshotRecord) -> bool {
        let deadline = record.created_at.checked_add(self.settings.snapshot_deadline);
        deadline.is_some_and(|at| self.clock.now() < at) && self.runtime.still_saves(record.id).await
    }
}
