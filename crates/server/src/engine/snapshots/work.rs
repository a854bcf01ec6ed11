//! Making snapshots: two workers take what was accepted, in order.
//!
//! A worker sleeps until something is accepted, and waits for a runtime that is away; the deadline counts from the request. What
//! came of it is written conditionally on `Creating` and tried until the store takes it.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    SandboxId, SnapshotId,
    ports::{
        runtime::{Condition, Observation, RuntimeError},
        store::Advance,
    },
    snapshot::{SnapshotRecord, SnapshotState},
};
use tokio_util::task::AbortOnDropHandle;
use tracing::{info, warn};

use super::WORKERS;
use crate::engine::{Engine, loops};

/// How long to leave a runtime alone that could not be reached, unless it reports back before.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// How long to leave a store alone that cannot be written.
const STORE_RETRY: Duration = Duration::from_secs(1);

/// How a snapshot ended.
struct Ended {
    state: SnapshotState,
    reason: &'static str,
    message: Option<String>,
}

impl Ended {
    fn ready() -> Self {
        Self { state: SnapshotState::Ready, reason: "snapshot_runtime_ready", message: None }
    }

    fn failed(reason: &'static str, message: impl Into<String>) -> Self {
        Self { state: SnapshotState::Failed, reason, message: Some(message.into()) }
    }

    fn late() -> Self {
        Self::failed("snapshot_runtime_timeout", "the snapshot was not made in time")
    }
}

/// The sandbox is being copied, for as long as this lives.
struct Copying<'a>(&'a Engine, SandboxId);

impl<'a> Copying<'a> {
    fn begin(engine: &'a Engine, source: SandboxId) -> Self {
        *engine.snapshots.copied().entry(source).or_default() += 1;
        Self(engine, source)
    }
}

impl Drop for Copying<'_> {
    fn drop(&mut self) {
        let mut copied = self.0.snapshots.copied();
        if let Some(times) = copied.get_mut(&self.1) {
            *times -= 1;
            if *times == 0 {
                copied.remove(&self.1);
            }
        }
    }
}

/// Starts the workers.
pub(super) fn spawn(engine: &Arc<Engine>) {
    for _ in 0..WORKERS {
        let engine_ = engine.clone();
        engine.tasks.spawn(async move {
            let waiting = engine_.snapshots.waiting.clone();
            let stopping = engine_.stopping.clone();
            loop {
                let next = async { waiting.lock().await.recv().await };
                let id = tokio::select! {
                    id = next => id,
                    () = stopping.cancelled() => return,
                };
                let Some(id) = id else { return };
                tokio::select! {
                    () = engine_.make_snapshot(id) => {}
                    // The row stays; the next start finds out what became of it.
                    () = stopping.cancelled() => return,
                }
                engine_.snapshots.mine().remove(&id);
            }
        });
    }
}

impl Engine {
    async fn make_snapshot(self: &Arc<Self>, id: SnapshotId) {
        let Some(record) = self.creating(id).await else { return };
        let copying = Copying::begin(self, record.source);
        let ended = self.copy(&record).await;
        let last = self.snapshots.copied().get(&record.source) == Some(&1);
        let now = if last { self.in_time(self.runtime.inspect(record.source)).await } else { Ok(None) };
        drop(copying);
        if let Ok(Some(now)) = now {
            self.as_wished(now).await;
        }
        if ended.state == SnapshotState::Failed {
            warn!(snapshot = %id, sandbox = %record.source, reason = ended.reason, message = ended.message, "snapshot failed");
        } else {
            info!(snapshot = %id, sandbox = %record.source, "snapshot ready");
        }
        let told = format!("{id} {} {}", ended.state.word(), ended.reason);
        let next = self.next_snapshot(&record, ended.state, ended.reason, ended.message);
        if self.end_snapshot(&next).await == Advance::Written && self.index.get(record.source).is_some() {
            self.note(record.source, "snapshot_finished", &told).await;
        }
    }

    async fn creating(&self, id: SnapshotId) -> Option<SnapshotRecord> {
        loop {
            match self.store.snapshot(id).await {
                Ok(record) => return record.filter(|r| r.state == SnapshotState::Creating),
                Err(error) => warn!(snapshot = %id, %error, "the store cannot be read; trying again"),
            }
            tokio::time::sleep(STORE_RETRY).await;
        }
    }

    /// Writes how it ended, until the store takes it.
    async fn end_snapshot(&self, next: &SnapshotRecord) -> Advance {
        loop {
            match self.store.advance_snapshot(SnapshotState::Creating, next).await {
                Ok(done) => return done,
                Err(error) => {
                    warn!(snapshot = %next.id, %error, "the store cannot be written; trying again");
                }
            }
            tokio::time::sleep(STORE_RETRY).await;
        }
    }

    async fn copy(self: &Arc<Self>, record: &SnapshotRecord) -> Ended {
        let deadline = record.created_at.checked_add(self.settings.snapshot_deadline);
        let Some(deadline) = deadline else { return Ended::late() };
        loop {
            let left = self.clock.now().until(deadline);
            if left.is_zero() {
                return Ended::late();
            }
            let (runtime, source, id) = (self.runtime.clone(), record.source, record.id);
            let mut call =
                AbortOnDropHandle::new(tokio::spawn(async move { runtime.snapshot(source, id).await }));
            let outcome = tokio::select! {
                outcome = &mut call => outcome,
                () = tokio::time::sleep(left) => {
                    self.outlive(id, call);
                    return Ended::late();
                }
            };
            let error = match outcome {
                Ok(Ok(())) => match self.in_time(self.runtime.has_snapshot(id)).await {
                    Ok(true) => return Ended::ready(),
                    Ok(false) => {
                        let message = "the runtime made it, but there is no such artifact";
                        return Ended::failed("snapshot_runtime_missing_image", message);
                    }
                    Err(error) if error.retryable() => error,
                    Err(error) => {
                        return Ended::failed("snapshot_runtime_missing_result", error.to_string());
                    }
                },
                Ok(Err(error)) if error.retryable() => error,
                Ok(Err(error)) => return Ended::failed("snapshot_runtime_failed", error.to_string()),
                Err(_) => return Ended::failed("snapshot_runtime_failed", "the runtime gave up"),
            };
            self.await_return(&error).await;
        }
    }

    /// Waits until the runtime is back, and at least a moment.
    async fn await_return(&self, error: &RuntimeError) {
        warn!(%error, "the snapshot waits for its runtime");
        let mut lost = self.lost.subscribe();
        tokio::time::sleep(RUNTIME_RETRY).await;
        let back = lost.wait_for(Option::is_none);
        let _ = tokio::time::timeout(RUNTIME_RETRY, back).await;
    }

    /// A call whose deadline passed may still make an artifact. If the row was removed meanwhile, the artifact has to go too.
    fn outlive(self: &Arc<Self>, id: SnapshotId, mut call: AbortOnDropHandle<Result<(), RuntimeError>>) {
        let engine = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                _ = &mut call => {}
                () = engine.stopping.cancelled() => return,
            }
            if let Ok(None) = engine.store.snapshot(id).await
                && let Err(error) = engine.in_time(engine.runtime.remove_snapshot(id)).await
            {
                warn!(snapshot = %id, %error, "an artifact that came too late could not be removed");
            }
        });
    }

    /// A runtime may hold the box still while it copies it. What was asked for meanwhile holds afterwards.
    async fn as_wished(self: &Arc<Self>, now: Observation) {
        let source = now.id;
        let Some(entry) = self.index.get(source).filter(|e| e.intent.is_none()) else { return };
        let wished = entry.observed.map(|o| o.condition.clone());
        let again = match (wished, &now.condition) {
            (Some(Condition::Paused), Condition::Running) => self.in_time(self.runtime.pause(source)).await,
            (Some(Condition::Running), Condition::Paused) => self.in_time(self.runtime.resume(source)).await,
            _ => Ok(now),
        };
        match again {
            Ok(now) => drop(loops::observe::observed(self, now).await),
            Err(error) => warn!(sandbox = %source, %error, "the sandbox is not as it was before its copy"),
        }
    }
}
