//! Judging a sandbox, and beginning what its policies ask for.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    lifecycle::{
        intent::{Intent, Operation, RemoveReason},
        state::State,
    },
    policy::{self, Action, Capture, Case, Cause, Next, Policies, Taking},
    ports::store::Advance,
    snapshot::SnapshotState,
};
use serde_json::json;
use tracing::{info, warn};

use super::Watched;
use crate::engine::{Engine, commit::EngineError, index::Entry, snapshots::Wanted};

/// Everything that a judgement needs, at one moment.
struct Seen {
    entry: Entry,
    policies: Policies,
    state: State,
    watched: Option<Watched>,
    capture: Capture,
    now: Timestamp,
}

impl Seen {
    fn case(&self) -> Case<'_> {
        let usage = self.watched.as_ref().map(|watched| &watched.usage);
        let heard = self.watched.as_ref().is_some_and(|watched| watched.heard) && self.entry.is_heard();
        Case {
            policies: &self.policies,
            state: self.state,
            // Life begins with the box.
            expires_at: self
                .entry
                .facts()
                .and_then(|facts| facts.expires_at)
                .filter(|_| !self.entry.is_awaited()),
            usage: usage.filter(|_| heard),
            taking: usage.and_then(|usage| usage.taking.as_ref()),
            capture: self.capture,
            now: self.now,
        }
    }

    fn taking(&self) -> Option<&Taking> {
        self.watched.as_ref().and_then(|watched| watched.usage.taking.as_ref())
    }
}

impl Engine {
    async fn see(&self, id: SandboxId) -> Result<Option<Seen>, EngineError> {
        let Some(entry) = self.index.get(id) else { return Ok(None) };
        let (Some(policies), Some(status)) = (entry.policies().cloned(), entry.status()) else {
            return Ok(None);
        };
        // So that the use of one that nobody has used yet is known.
        self.watch(id, |_| {});
        let watched = self.book.lock().get(&id).cloned();
        let snapshot = watched.as_ref().and_then(|watched| watched.usage.taking.as_ref()?.snapshot);
        let capture = match snapshot {
            None => Capture::None,
            Some(id) => match self.store.snapshot(id).await?.map(|record| record.state) {
                None => Capture::None,
                Some(SnapshotState::Creating) => Capture::UnderWay,
                Some(SnapshotState::Ready) => Capture::Ready,
                Some(SnapshotState::Failed | SnapshotState::Deleting) => Capture::Failed,
            },
        };
        Ok(Some(Seen { entry, policies, state: status.state, watched, capture, now: self.clock.now() }))
    }

    /// Judges one sandbox and begins what is due. Returns when to look again at the latest, if something is awaited.
    ///
    /// # Errors
    /// When the store cannot be used; nothing was begun then that is not stored.
    pub(in crate::engine) async fn judge(
        self: &Arc<Self>,
        id: SandboxId,
    ) -> Result<Option<Timestamp>, EngineError> {
        let Some(seen) = self.see(id).await? else { return Ok(None) };
        match policy::next(&seen.case()) {
            Next::Wait(at) if seen.taking().is_none() => return Ok(Some(at)),
            Next::Rest if seen.taking().is_none() => return Ok(None),
            _ => {}
        }
        // When somebody holds it, the next pass comes by again.
        let Ok(_facts) = self.facts_lock(id).try_lock() else { return Ok(None) };
        let Some(seen) = self.see(id).await? else { return Ok(None) };
        let Some(seen) = self.follow(id, seen).await? else { return Ok(None) };
        match policy::next(&seen.case()) {
            Next::Rest | Next::Hold => Ok(None),
            Next::Wait(at) => Ok(Some(at)),
            Next::Pause(cause) => self.freeze_by_policy(&seen, cause).await.map(|()| None),
            Next::Capture(cause) => self.capture_by_policy(&seen, cause).await.map(|()| None),
            Next::Remove(cause) => self.remove_by_policy(&seen, cause).await.map(|()| None),
        }
    }

    /// What became of the action that was begun. Returns what is to be judged now; `None` when that is to be seen first.
    async fn follow(&self, id: SandboxId, seen: Seen) -> Result<Option<Seen>, EngineError> {
        let Some(taking) = seen.taking().cloned() else { return Ok(Some(seen)) };
        let action = seen.action(taking.cause);
        if policy::withdrawn(&seen.case()) || (action == Action::Pause && seen.state == State::Paused) {
            self.take(id, None).await?;
            return Ok(None);
        }
        if taking.not_before.is_some() {
            return Ok(Some(seen));
        }
        let error = match (action, seen.capture) {
            (Action::Snapshot, Capture::Failed) => self.why_not_captured(&taking).await?,
            (Action::Pause, _) if seen.state == State::Running && seen.entry.intent.is_none() => {
                let told = seen.entry.failure.as_ref().map(|(_, error)| error.to_string());
                told.unwrap_or_else(|| "the pause did not take effect".to_owned())
            }
            _ => return Ok(Some(seen)),
        };
        self.missed(&seen, &taking, error).await?;
        Ok(None)
    }

    async fn why_not_captured(&self, taking: &Taking) -> Result<String, EngineError> {
        let record = match taking.snapshot {
            Some(id) => self.store.snapshot(id).await?,
            None => None,
        };
        let told = record.map(|record| record.message.unwrap_or(record.reason));
        Ok(told.unwrap_or_else(|| "the snapshot is gone".to_owned()))
    }

    /// An attempt failed: told in the history, and kept.
    async fn missed(&self, seen: &Seen, taking: &Taking, error: String) -> Result<(), EngineError> {
        let id = seen.entry.id;
        let action = seen.action(taking.cause).word();
        warn!(sandbox = %id, cause = taking.cause.word(), action, error, "an action of a policy failed");
        let told = json!({
            "policy": taking.cause.word(), "action": action, "attempt": taking.attempts, "message": error,
            "snapshotId": taking.snapshot.map(|id| id.to_string()),
        });
        self.take(id, Some(taking.failed(error, seen.now))).await?;
        self.note(id, "policy_failed", &told.to_string()).await;
        Ok(())
    }

    /// Stores which action is under way.
    async fn take(&self, id: SandboxId, taking: Option<Taking>) -> Result<(), EngineError> {
        let mut usage = {
            let mut book = self.book.lock();
            let watched = book.entry(id).or_insert_with(|| Watched {
                // Of one without an idle policy only the action counts.
                usage: policy::Usage::begun(self.clock.now()),
                stored: None,
                heard: false,
            });
            watched.usage.clone()
        };
        usage.taking = taking;
        self.store.save_usage(id, &usage).await?;
        if let Some(watched) = self.book.lock().get_mut(&id) {
            watched.usage.taking.clone_from(&usage.taking);
            watched.stored = Some(usage);
        }
        Ok(())
    }

    /// The line that says why something is about to be done; once, however many attempts there are.
    async fn tell_cause(&self, seen: &Seen, cause: Cause) {
        if seen.taking().is_some_and(|taking| taking.cause == cause) {
            return;
        }
        let action = seen.action(cause).word();
        let (kind, told) = match cause {
            Cause::Idle => {
                let usage = seen.watched.as_ref().map(|watched| &watched.usage);
                let last = usage.map(|usage| usage.in_use_until(seen.policies.max_presence()).to_string());
                ("idle", json!({"action": action, "lastActivityAt": last}))
            }
            Cause::Expiry => {
                let at = seen.entry.facts().and_then(|facts| facts.expires_at).map(|at| at.to_string());
                ("expiring", json!({"action": action, "expiresAt": at}))
            }
        };
        info!(sandbox = %seen.entry.id, kind, action, "a policy takes effect");
        self.note(seen.entry.id, kind, &told.to_string()).await;
    }

    async fn freeze_by_policy(self: &Arc<Self>, seen: &Seen, cause: Cause) -> Result<(), EngineError> {
        let id = seen.entry.id;
        self.tell_cause(seen, cause).await;
        self.take(id, Some(seen.attempt(cause, None))).await?;
        let intent = Intent {
            sandbox_id: id,
            generation: seen.entry.next_generation(),
            operation: Operation::Pause,
            accepted_at: seen.now,
            deadline: self.in_future(self.settings.freeze_deadline),
        };
        let event = self.event("pause_requested", cause.word());
        // A lost race is somebody else's operation: judged again when that is over.
        if self.advance(seen.entry.generation(), intent, Some(&event)).await? == Advance::Written {
            self.poke(id);
        }
        Ok(())
    }

    async fn capture_by_policy(self: &Arc<Self>, seen: &Seen, cause: Cause) -> Result<(), EngineError> {
        let id = seen.entry.id;
        self.tell_cause(seen, cause).await;
        // One whose record was never written is made under the same id.
        let lost = seen.taking().filter(|taking| taking.cause == cause && taking.not_before.is_none());
        let taking = match lost {
            Some(taking) => taking.clone(),
            None => seen.attempt(cause, Some(SnapshotId::random())),
        };
        self.take(id, Some(taking.clone())).await?;
        let description = match cause {
            Cause::Idle => "made by policies.idleAction, because nobody used the sandbox",
            Cause::Expiry => {
                "made by policies.onExpire, because the time of the sandbox was about to be over"
            }
        };
        let wanted = Wanted {
            id: taking.snapshot.unwrap_or_else(SnapshotId::random),
            name: Some(cause.word().to_owned()),
            description: Some(description.to_owned()),
            namespace: seen.policies.namespace.clone(),
        };
        match self.accept_snapshot(&seen.entry, wanted).await {
            Ok(_) => Ok(()),
            Err(error) => self.missed(seen, &taking, error.to_string()).await,
        }
    }

    async fn remove_by_policy(self: &Arc<Self>, seen: &Seen, cause: Cause) -> Result<(), EngineError> {
        let id = seen.entry.id;
        match cause {
            Cause::Expiry => self.remove_expired(id).await,
            Cause::Idle => {
                self.tell_cause(seen, cause).await;
                self.want_removed(id, RemoveReason::Idle).await.map(drop)
            }
        }
    }
}

impl Seen {
    fn action(&self, cause: Cause) -> Action {
        match cause {
            Cause::Expiry => self.policies.on_expire,
            Cause::Idle => self.policies.idle.map_or(Action::Terminate, |idle| idle.action),
        }
    }

    fn attempt(&self, cause: Cause, snapshot: Option<SnapshotId>) -> Taking {
        match self.taking().filter(|taking| taking.cause == cause) {
            Some(taking) => taking.again(snapshot),
            None => Taking::first(cause, snapshot),
        }
    }
}

/// The longest sleep of the loop, so that use, renewals and a clock that jumped are seen.
pub(in crate::engine) const LONGEST_SLEEP: Duration = Duration::from_secs(1);
