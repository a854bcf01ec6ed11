//! Snapshots: accepted, made in the background, removed, and finished after a crash.
//!
//! Owns the rows and their transitions, each conditional on the state it starts from. Does not own the artifacts: they are the runtime's,
//! found again by the snapshot's id.
//!
//! Invariants: the row is written before the runtime is touched and removed after the artifact is gone, so there is no artifact without a row;
//! `Creating` and `Deleting` always have somebody who ends them: a worker, a request, or the look that follows a restart and a runtime that
//! came back; a snapshot with a sandbox made from it, or about to be, is not removed.

mod remove;
mod settle;
mod work;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId, SnapshotId,
    lifecycle::state::State,
    ports::{RuntimeErrorKind, StoreError, runtime::RuntimeError},
    snapshot::{RestoreConfig, SnapshotRecord, SnapshotState},
};
use tokio::sync::{Notify, mpsc};
use tracing::info;

use super::{Engine, commit::EngineError, index::Entry, stripes};

pub(super) use settle::spawn;

/// Snapshots made at the same time.
const WORKERS: usize = 2;
/// Accepted snapshots that wait for a worker; more are refused.
const QUEUE: usize = 256;
/// Pause before what was left is looked at again.
const LOOK_PAUSE: Duration = Duration::from_secs(1);
/// Snapshots share this many locks; a shared one only costs a short wait.
const LOCKS: usize = 64;

/// Why a request about a snapshot was not carried out.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SnapshotError {
    #[error("no such snapshot")]
    NotFound,
    #[error("only a running sandbox can be snapshotted (its state is {})", .0.word())]
    SourceState(State),
    #[error("the {0} runtime makes no snapshots")]
    NotImplemented(&'static str),
    #[error("{QUEUE} snapshots are waiting to be made already")]
    Busy,
    #[error("the snapshot is {} and cannot be removed now", .0.word())]
    State(SnapshotState),
    #[error("the snapshot was changed by somebody else at the same time")]
    Changed,
    #[error("the snapshot is in use: {0}")]
    InUse(String),
    #[error("the snapshot is {}, not Ready", .0.word())]
    NotReady(SnapshotState),
    #[error("{0}")]
    RestoreConfig(String),
    #[error("the artifact of the snapshot could not be removed: {0}")]
    RemoveFailed(Arc<RuntimeError>),
    #[error("the runtime cannot be reached; the snapshot is removed when it is back: {0}")]
    Unreachable(Arc<RuntimeError>),
    #[error("the runtime of the sandbox cannot be reached: {0}")]
    SourceUnreachable(Arc<RuntimeError>),
    #[error("the store failed: {0}")]
    Store(Arc<StoreError>),
}

impl From<StoreError> for SnapshotError {
    fn from(error: StoreError) -> Self {
        Self::Store(Arc::new(error))
    }
}

/// A snapshot that is to be made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Wanted {
    /// Of the caller's own choosing, so that it is found again whatever happens meanwhile.
    pub id: SnapshotId,
    pub name: Option<String>,
    pub description: Option<String>,
    pub namespace: Option<String>,
}

/// What the engine keeps about snapshots. Memory only: after a restart the rows tell.
#[derive(Debug)]
pub(super) struct Snapshots {
    queue: mpsc::Sender<SnapshotId>,
    waiting: Arc<tokio::sync::Mutex<mpsc::Receiver<SnapshotId>>>,
    /// Accepted by this process and not ended yet: nobody else's business.
    mine: Mutex<HashSet<SnapshotId>>,
    /// Sandboxes that are being copied, and how many times at once.
    copied: Mutex<HashMap<SandboxId, usize>>,
    /// Held while a sandbox is accepted that is to be made from the snapshot, and while a removal finds out that there is none. Short.
    gates: Box<[tokio::sync::Mutex<()>]>,
    /// Held by the one who removes the artifact.
    removals: Box<[tokio::sync::Mutex<()>]>,
    /// Something was left that has to be looked at again.
    left: Notify,
}

impl Default for Snapshots {
    fn default() -> Self {
        let (queue, waiting) = mpsc::channel(QUEUE);
        let locks = || (0..LOCKS).map(|_| tokio::sync::Mutex::new(())).collect();
        Self {
            queue,
            waiting: Arc::new(tokio::sync::Mutex::new(waiting)),
            mine: Mutex::default(),
            copied: Mutex::default(),
            gates: locks(),
            removals: locks(),
            left: Notify::new(),
        }
    }
}

impl Snapshots {
    fn mine(&self) -> MutexGuard<'_, HashSet<SnapshotId>> {
        self.mine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn copied(&self) -> MutexGuard<'_, HashMap<SandboxId, usize>> {
        self.copied.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the sandbox is being copied, for which its runtime may hold it still.
    pub(super) fn copies(&self, source: SandboxId) -> bool {
        self.copied().contains_key(&source)
    }

    /// Makes sure that somebody looks for rows that nobody ends.
    pub(super) fn look(&self) {
        self.left.notify_one();
    }

    fn gate(&self, id: SnapshotId) -> &tokio::sync::Mutex<()> {
        stripes::of(&self.gates, id)
    }

    fn removal(&self, id: SnapshotId) -> &tokio::sync::Mutex<()> {
        stripes::of(&self.removals, id)
    }
}

impl Engine {
    /// Accepts a snapshot of a running sandbox; it is made in the background.
    ///
    /// # Errors
    /// In the documented order: the source's state, a runtime that cannot, a runtime that is away; then a full queue.
    pub async fn create_snapshot(
        self: &Arc<Self>,
        source: &str,
        name: Option<String>,
        namespace: Option<&str>,
    ) -> Result<SnapshotRecord, EngineError> {
        let entry = self.find(source)?;
        let state = entry.status().map_or(State::Stopping, |s| s.state);
        if state != State::Running {
            return Err(SnapshotError::SourceState(state).into());
        }
        let namespace = namespace.map(str::to_owned);
        let wanted = Wanted { id: SnapshotId::random(), name, description: None, namespace };
        self.accept_snapshot(&entry, wanted).await
    }

    /// Accepts a snapshot of a box that is up, frozen or not.
    pub(super) async fn accept_snapshot(
        self: &Arc<Self>,
        entry: &Entry,
        wanted: Wanted,
    ) -> Result<SnapshotRecord, EngineError> {
        let Wanted { id, name, description, namespace } = wanted;
        if !self.runtime.capabilities().snapshot {
            return Err(SnapshotError::NotImplemented(self.runtime.name()).into());
        }
        self.reachable().map_err(SnapshotError::SourceUnreachable)?;
        if self.stopping.is_cancelled() {
            return Err(SnapshotError::Busy.into());
        }
        let place = self.snapshots.queue.try_reserve().map_err(|_| SnapshotError::Busy)?;
        let now = self.clock.now();
        let record = SnapshotRecord {
            id,
            source: entry.id,
            namespace,
            name,
            description,
            restore: Some(RestoreConfig {
                backend: self.runtime.name().to_owned(),
                image: self.runtime.snapshot_image(id),
            }),
            state: SnapshotState::Creating,
            reason: "snapshot_accepted".to_owned(),
            message: None,
            last_transition_at: now,
            created_at: now,
        };
        self.snapshots.mine().insert(id);
        if let Err(error) = self.store.insert_snapshot(&record).await {
            self.snapshots.mine().remove(&id);
            // It may be there all the same, and then it has to come to an end.
            self.snapshots.look();
            return Err(SnapshotError::from(error).into());
        }
        info!(snapshot = %id, sandbox = %entry.id, "snapshot accepted");
        place.send(id);
        self.note(entry.id, "snapshot_started", &id.to_string()).await;
        Ok(record)
    }

    /// One snapshot, whatever its namespace.
    ///
    /// # Errors
    /// When there is none of that id, or the store cannot be read.
    pub async fn find_snapshot(&self, id: &str) -> Result<SnapshotRecord, SnapshotError> {
        let id: SnapshotId = id.parse().map_err(|_| SnapshotError::NotFound)?;
        self.store.snapshot(id).await?.ok_or(SnapshotError::NotFound)
    }

    /// What a sandbox restored from the snapshot is made of.
    ///
    /// # Errors
    /// When it is not Ready, or this runtime cannot restore it.
    pub fn restore_image(&self, snapshot: &SnapshotRecord) -> Result<String, SnapshotError> {
        if snapshot.state != SnapshotState::Ready {
            return Err(SnapshotError::NotReady(snapshot.state));
        }
        let unfit = |why: String| Err(SnapshotError::RestoreConfig(why));
        match &snapshot.restore {
            None => unfit("the snapshot names nothing that could be restored".to_owned()),
            Some(restore) if restore.image.trim().is_empty() => {
                unfit("the snapshot names nothing that could be restored".to_owned())
            }
            Some(restore) if restore.backend != self.runtime.name() => unfit(format!(
                "the snapshot was made by the {} runtime; this server runs the {} runtime",
                restore.backend,
                self.runtime.name()
            )),
            Some(restore) => Ok(restore.image.clone()),
        }
    }

    /// Keeps the snapshot as it is until the answer is dropped: nobody begins to remove it meanwhile.
    pub(super) async fn restorable(
        &self,
        snapshot: Option<SnapshotId>,
    ) -> Result<Option<tokio::sync::MutexGuard<'_, ()>>, EngineError> {
        let Some(id) = snapshot else { return Ok(None) };
        let gate = self.snapshots.gate(id).lock().await;
        match self.store.snapshot(id).await? {
            Some(record) if record.state == SnapshotState::Ready => Ok(Some(gate)),
            _ => Err(EngineError::SnapshotNotReady),
        }
    }

    /// The record in its next state.
    fn next_snapshot(
        &self,
        record: &SnapshotRecord,
        state: SnapshotState,
        reason: &str,
        message: Option<String>,
    ) -> SnapshotRecord {
        SnapshotRecord {
            state,
            reason: reason.to_owned(),
            message,
            last_transition_at: self.clock.now(),
            ..record.clone()
        }
    }

    /// A runtime call about a snapshot must not take for ever.
    async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, RuntimeError>>,
    ) -> Result<T, RuntimeError> {
        tokio::time::timeout(self.settings.delete_patience, call).await.unwrap_or_else(|_| {
            Err(RuntimeError::new(RuntimeErrorKind::Unavailable, "snapshot", "the runtime does not answer"))
        })
    }
}
