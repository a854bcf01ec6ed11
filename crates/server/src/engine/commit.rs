//! The only writer of what is wanted: every user request and every expiry becomes an intent here, conditional on the
//! generation that was seen, together with its history line.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{
        boot::Reason,
        intent::{Create, Intent, Operation, Progress, RemoveReason, StoredError},
        request::{Refused, Request, Verdict, ask},
        state::State,
    },
    pool::Origin,
    ports::{
        RuntimeErrorKind, StoreError,
        runtime::RuntimeError,
        store::{Advance, Claim, IdempotencyRecord},
    },
    source::BuildPolicy,
    spec::{MutableFacts, Secrets, Spec},
};
use tracing::{info, warn};

use super::{Engine, history::RENEWED, index::Entry, pools::Claimed, written::Unwritten};
use crate::workspace::Confidential;

/// How long a create that is written down may take to be seen.
const SEEN_SOON: Duration = Duration::from_secs(5);
/// Times a lost compare-and-swap is tried again before giving up: about five seconds.
const ATTEMPTS: u32 = 250;
/// Pause before the next try. The driver that won the race shows its result in the index within this time.
pub(super) const AFTER_LOST_RACE: Duration = Duration::from_millis(20);

/// Why a request about a sandbox was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    #[error("no sandbox {0}")]
    NotFound(String),
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the sandbox has no expiry (manual cleanup), so there is nothing to renew")]
    ManualCleanup,
    #[error("expiresAt must be in the future")]
    NotInFuture,
    #[error("could not create the sandbox, failed in phase {}: {}", .0.phase, .0.message)]
    CreateFailed(StoredError),
    #[error("could not {operation} the sandbox: {error}")]
    OperationFailed { operation: &'static str, error: Arc<RuntimeError> },
    #[error("this Idempotency-Key was used with a different request")]
    KeyReused,
    #[error("the sandbox created with this Idempotency-Key no longer exists")]
    KeySpent,
    #[error("this server holds {0} sandboxes, which is its configured maximum")]
    TooMany(usize),
    #[error("the snapshot was removed or is not ready any more")]
    SnapshotNotReady,
    #[error("this server makes no sandboxes from repositories")]
    NoRepositories,
    #[error("no image of this repository fits, and the request forbids to build one")]
    NotCached,
    #[error(
        "sandboxes from this repository did not become ready of late; the next attempt makes sense in {} s",
        .0.as_secs().max(1)
    )]
    CircuitOpen(Duration),
    #[error("the sandbox is changing too fast; try again")]
    Contended,
    #[error(transparent)]
    Pool(#[from] super::pools::PoolError),
    #[error(transparent)]
    Snapshot(#[from] super::snapshots::SnapshotError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// What opens a box, at random.
pub(super) fn token() -> String {
    let mut raw = [0u8; 24];
    raw[..16].copy_from_slice(uuid::Uuid::new_v4().as_bytes());
    raw[16..].copy_from_slice(&uuid::Uuid::new_v4().as_bytes()[..8]);
    URL_SAFE_NO_PAD.encode(raw)
}

/// An accepted create request.
#[derive(Debug)]
pub struct NewSandbox {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub secrets: Secrets,
    /// The `Idempotency-Key` and a digest of the request it came with.
    pub key: Option<(String, String)>,
    /// The pool whose box it takes, if one fits.
    pub pool: Option<String>,
    /// What a create from a repository brought along that is not to be stored.
    pub confidential: Confidential,
}

/// What came of writing a create down.
enum Accepted {
    New,
    /// Its key stands for a create that was accepted before.
    Before(Box<Entry>),
}

impl Engine {
    /// Accepts a sandbox and waits a short grace for it to come up. The entry is `Pending` when it needs longer.
    ///
    /// # Errors
    /// `CreateFailed` when it failed within the grace; nothing is left of it then.
    pub async fn create(self: &Arc<Self>, new: NewSandbox, now: Timestamp) -> Result<Entry, EngineError> {
        if let Some((key, fingerprint)) = &new.key
            && let Some(taken) = self.store.idempotency(key).await?
        {
            return self.repeat(&taken, fingerprint).await;
        }
        let (claimed, origin) = match &new.pool {
            Some(pool) => {
                let (claimed, origin) = self.claim(pool, &new.spec)?;
                (claimed, Some(origin))
            }
            None => (None, None),
        };
        let max = self.settings.max_sandboxes;
        if max > 0 && self.index.len() + self.pools.held() >= max {
            return Err(EngineError::TooMany(max));
        }
        let id = claimed.as_ref().map_or_else(SandboxId::random, Claimed::id);
        let intent = self.create_intent(id, &new, origin, now)?;
        self.try_kind(id, &new.spec).await?;
        let spec = new.spec.clone();
        let accepted = self.accept(id, new, intent, claimed).await;
        if !matches!(accepted, Ok(Accepted::New)) {
            self.kind_withdrawn(id, &spec).await;
        }
        match accepted? {
            Accepted::New => self.await_creation(id).await,
            Accepted::Before(entry) => Ok(*entry),
        }
    }

    /// Writes the create down and has it begun.
    async fn accept(
        self: &Arc<Self>,
        id: SandboxId,
        new: NewSandbox,
        intent: Intent,
        mut claimed: Option<Claimed>,
    ) -> Result<Accepted, EngineError> {
        if new.spec.source.is_some() {
            if let Some(claimed) = &mut claimed {
                claimed.spend();
            }
            self.keep_secrets(id, &new.confidential).await?;
        }
        let written = self.write_down(&new, &intent).await;
        let unwritten = matches!(&written, Ok((Claim::Taken(_), _)) | Err(Unwritten::Surely(_)));
        // A box of a pool takes them along when it goes.
        if unwritten && claimed.is_none() {
            self.forget_agent_of(id);
        }
        let (claim, unchanged) = written?;
        if let (Claim::Taken(taken), Some((_, fingerprint))) = (claim, &new.key) {
            let entry = self.repeat(&taken, fingerprint).await?;
            return Ok(Accepted::Before(Box::new(entry)));
        }
        info!(sandbox = %id, image = new.spec.image, "accepted");
        if !new.secrets.is_empty() {
            self.secrets().insert(id, Arc::new(new.secrets));
        }
        self.index.set_intent(intent);
        if let Some(claimed) = claimed {
            claimed.keep();
        }
        // From here on the snapshot can be seen to be in use.
        drop(unchanged);
        self.poke(id);
        Ok(Accepted::New)
    }

    fn create_intent(
        &self,
        id: SandboxId,
        new: &NewSandbox,
        origin: Option<Origin>,
        now: Timestamp,
    ) -> Result<Intent, EngineError> {
        Ok(Intent {
            sandbox_id: id,
            generation: 1,
            operation: Operation::Create(Box::new(Create {
                spec: new.spec.clone(),
                facts: new.facts.clone(),
                agent_token: token(),
                route_token: token(),
                had_credentials: !new.secrets.is_empty(),
                progress: Progress::Accepted,
                origin,
            })),
            accepted_at: now,
            deadline: self.in_future(match new.spec.source {
                Some(_) => self.settings.provision_deadline,
                None => self.settings.create_deadline,
            }),
        })
    }

    /// Before anything is written down: a create whose secrets are lost could not be carried out.
    async fn keep_secrets(&self, id: SandboxId, secrets: &Confidential) -> Result<(), EngineError> {
        let Some(provisioner) = self.provisioner() else { return Err(EngineError::NoRepositories) };
        let kept = provisioner.accept(id, secrets).await;
        kept.map_err(|e| EngineError::OperationFailed { operation: "create", error: Arc::new(e) })
    }

    pub(super) fn in_future(&self, delay: Duration) -> Timestamp {
        let now = self.clock.now();
        now.checked_add(delay).unwrap_or(now)
    }

    /// The sandbox that a key stands for. One that was written down by another request a moment ago is about to be seen.
    async fn repeat(&self, taken: &IdempotencyRecord, fingerprint: &str) -> Result<Entry, EngineError> {
        if taken.fingerprint != fingerprint {
            return Err(EngineError::KeyReused);
        }
        let id = taken.sandbox_id;
        if let Some(entry) = self.index.get(id) {
            return Ok(entry);
        }
        let open = self.store.open_intents().await?;
        if !open.iter().any(|intent| intent.sandbox_id == id) {
            return self.index.get(id).ok_or(EngineError::KeySpent);
        }
        let seen = self.index.wait_for(id, |entry| entry.cloned());
        tokio::time::timeout(SEEN_SOON, seen).await.map_err(|_| EngineError::Contended)
    }

    async fn await_creation(self: &Arc<Self>, id: SandboxId) -> Result<Entry, EngineError> {
        // How a repository fares is told by the sandbox itself, but for what the request made a condition.
        let source = self.index.get(id).and_then(|e| e.spec().and_then(|spec| spec.source.clone()));
        if let Some(source) = &source
            && source.image_build.policy != BuildPolicy::RequireCached
        {
            return self.index.get(id).ok_or_else(|| EngineError::NotFound(id.to_string()));
        }
        let settled = self.index.wait_for(id, |entry| {
            let entry = entry?;
            let settled = entry.status().is_some_and(|s| s.state != State::Pending);
            settled.then(|| entry.clone())
        });
        let entry = match tokio::time::timeout(self.settings.create_grace, settled).await {
            Ok(entry) => entry,
            // Still pending, or deleted meanwhile by somebody who knew the id.
            Err(_) => return self.index.get(id).ok_or_else(|| EngineError::NotFound(id.to_string())),
        };
        let failure = match entry.intent.as_deref() {
            Some(Intent { operation: Operation::Create(create), generation, .. }) => match &create.progress {
                Progress::Failed { failure: Some(failure), .. }
                    if failure.reason != Reason::ImageNotCached =>
                {
                    None
                }
                Progress::Failed { error, .. } => Some((*generation, error.clone())),
                _ => None,
            },
            _ => None,
        };
        let Some((generation, error)) = failure else { return Ok(entry) };
        let event = self.last_line(RemoveReason::CreateFailed.word());
        self.close(id, generation, &[event]).await?;
        self.store.release_key(id).await?;
        self.forget_agent_of(id);
        if source.is_some() {
            return Err(EngineError::NotCached);
        }
        Err(EngineError::CreateFailed(error))
    }

    /// The sandbox, if the caller may see it.
    pub fn find(&self, id: &str) -> Result<Entry, EngineError> {
        let gone = || EngineError::NotFound(id.chars().take(64).collect());
        let parsed: SandboxId = id.parse().map_err(|_| gone())?;
        let entry = self.index.get(parsed).ok_or_else(gone)?;
        if entry.status().is_none() {
            return Err(gone());
        }
        Ok(entry)
    }

    /// Freezes the sandbox and returns when it is frozen.
    pub async fn pause(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        self.freeze(id, Request::Pause, Operation::Pause, "pause").await
    }

    /// Thaws the sandbox and returns when it runs.
    pub async fn resume(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        self.freeze(id, Request::Resume, Operation::Resume, "resume").await
    }

    async fn freeze(
        self: &Arc<Self>,
        id: &str,
        request: Request,
        operation: Operation,
        word: &'static str,
    ) -> Result<(), EngineError> {
        for _ in 0..ATTEMPTS {
            let entry = self.find(id)?;
            let state = entry.status().ok_or_else(|| EngineError::NotFound(id.into()))?.state;
            match ask(request, state) {
                Verdict::Refused(Refused::Gone) => return Err(EngineError::NotFound(id.into())),
                Verdict::Refused(why) => return Err(why.into()),
                Verdict::Again => {
                    return self.await_operation(entry.id, entry.generation().unwrap_or(0), word).await;
                }
                Verdict::Accept => {}
            }
            if request == Request::Resume {
                self.relive(&entry).await?;
            }
            let intent = Intent {
                sandbox_id: entry.id,
                generation: entry.next_generation(),
                operation: operation.clone(),
                accepted_at: self.clock.now(),
                deadline: self.in_future(self.settings.freeze_deadline),
            };
            let event = self.event(&format!("{word}_requested"), "");
            let generation = intent.generation;
            if self.advance(entry.generation(), intent, Some(&event)).await? == Advance::Written {
                self.poke(entry.id);
                return self.await_operation(entry.id, generation, word).await;
            }
            tokio::time::sleep(AFTER_LOST_RACE).await;
        }
        Err(EngineError::Contended)
    }

    /// Waits until the intent of this generation is closed and tells how it ended.
    async fn await_operation(
        &self,
        id: SandboxId,
        generation: u64,
        operation: &'static str,
    ) -> Result<(), EngineError> {
        let over = self.index.wait_for(id, |entry| match entry {
            None => Some(Err(EngineError::NotFound(id.to_string()))),
            Some(e) if e.removing() => Some(Err(EngineError::NotFound(id.to_string()))),
            Some(e) if e.generation() == Some(generation) => None,
            Some(e) => Some(match &e.failure {
                Some((failed, error)) if *failed == generation => {
                    Err(EngineError::OperationFailed { operation, error: error.clone() })
                }
                _ => Ok(()),
            }),
        });
        let patience = self.settings.freeze_deadline + Duration::from_secs(5);
        tokio::time::timeout(patience, over).await.unwrap_or(Err(EngineError::Contended))
    }

    /// Removes the sandbox and returns when nothing of it is left. Joins a removal in flight.
    pub async fn delete(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        let entry = self.find(id)?;
        let hook = entry.spec().filter(|spec| spec.hooks.pre_stop.is_some());
        let patience =
            self.settings.delete_patience + hook.map_or(Duration::ZERO, |spec| spec.hooks.pre_stop_timeout());
        let Some(generation) = self.want_removed(entry.id, RemoveReason::UserDelete).await? else {
            return Ok(());
        };
        let gone = self.index.wait_for(entry.id, |entry| match entry {
            None => Some(Ok(())),
            Some(e) => match &e.failure {
                Some((failed, error)) if *failed >= generation => {
                    Some(Err(EngineError::OperationFailed { operation: "remove", error: error.clone() }))
                }
                _ => None,
            },
        });
        tokio::time::timeout(patience, gone).await.unwrap_or_else(|_| {
            let error = RuntimeError::new(
                RuntimeErrorKind::Unavailable,
                "remove",
                "it takes longer than expected and goes on",
            );
            Err(EngineError::OperationFailed { operation: "remove", error: Arc::new(error) })
        })
    }

    /// Writes a remove intent, superseding whatever was open, also a removal that waits for its next attempt: who asks again
    /// wants it tried now. Returns its generation; `None` when there is nothing to remove.
    pub(super) async fn want_removed(
        self: &Arc<Self>,
        id: SandboxId,
        reason: RemoveReason,
    ) -> Result<Option<u64>, EngineError> {
        for _ in 0..ATTEMPTS {
            let Some(entry) = self.index.get(id) else { return Ok(None) };
            if let Some(Intent {
                operation: Operation::Remove { not_before: None, .. }, generation, ..
            }) = entry.intent.as_deref()
            {
                return Ok(Some(*generation));
            }
            let now = self.clock.now();
            let intent = Intent {
                sandbox_id: id,
                generation: entry.next_generation(),
                operation: Operation::Remove { reason, not_before: None, last_error: None },
                accepted_at: now,
                // A removal never gives up; the deadline only dates the attempt.
                deadline: self.in_future(self.settings.remove_retry),
            };
            self.announce_overtaken_create(&entry).await;
            // The intent that says what it was to be goes with the next write.
            if entry.observed.is_none() {
                self.keep_looks(id).await?;
            }
            let event = self.event("remove_requested", reason.word());
            let generation = intent.generation;
            if self.advance(entry.generation(), intent, Some(&event)).await? == Advance::Written {
                self.poke(id);
                if let Some(spec) = entry.spec().filter(|_| entry.is_being_made()) {
                    self.kind_withdrawn(id, spec).await;
                }
                return Ok(Some(generation));
            }
            tokio::time::sleep(AFTER_LOST_RACE).await;
        }
        Err(EngineError::Contended)
    }

    /// A create that is removed before it had an outcome still leaves its line in the history.
    async fn announce_overtaken_create(&self, entry: &Entry) {
        let Some(Intent { operation: Operation::Create(create), accepted_at, .. }) = entry.intent.as_deref()
        else {
            return;
        };
        if matches!(create.progress, Progress::Failed { .. }) {
            return;
        }
        self.announce(entry.id, create, *accepted_at).await;
    }

    /// Moves the expiry. Returns the new instant.
    pub async fn renew(self: &Arc<Self>, id: &str, expires_at: Timestamp) -> Result<Timestamp, EngineError> {
        let id_of = self.find(id)?.id;
        if expires_at <= self.clock.now() {
            return Err(EngineError::NotInFuture);
        }
        self.change_facts(id_of, Request::Renew, |facts| {
            if facts.expires_at.is_none() {
                return Err(EngineError::ManualCleanup);
            }
            facts.expires_at = Some(expires_at);
            Ok(())
        })
        .await?;
        // The renewal itself lies with the runtime and holds, whether this line is written or not.
        self.note(id_of, RENEWED, &expires_at.to_string()).await;
        Ok(expires_at)
    }

    /// Merges the patch into the metadata: a value replaces, `None` deletes.
    pub async fn patch_metadata(
        self: &Arc<Self>,
        id: &str,
        patch: &BTreeMap<String, Option<String>>,
    ) -> Result<Entry, EngineError> {
        let id_of = self.find(id)?.id;
        self.change_facts(id_of, Request::PatchMetadata, |facts| {
            for (key, value) in patch {
                match value {
                    Some(value) => facts.metadata.insert(key.clone(), value.clone()),
                    None => facts.metadata.remove(key),
                };
            }
            Ok(())
        })
        .await?;
        let names: Vec<&str> = patch.keys().map(String::as_str).collect();
        self.note(id_of, "metadata_changed", &names.join(" ")).await;
        let entry = self.find(id)?;
        if entry.spec().is_some_and(|spec| spec.source.is_some()) {
            // The one of when it was ready has other labels.
            self.keep_looks_if_possible(id_of).await;
        }
        Ok(entry)
    }

    pub(super) async fn change_facts(
        self: &Arc<Self>,
        id: SandboxId,
        request: Request,
        change: impl Fn(&mut MutableFacts) -> Result<(), EngineError>,
    ) -> Result<(), EngineError> {
        let _facts = self.facts_lock(id).lock().await;
        let gone = || EngineError::NotFound(id.to_string());
        for _ in 0..ATTEMPTS {
            let entry = self.index.get(id).ok_or_else(gone)?;
            let state = entry.status().ok_or_else(gone)?.state;
            let mut facts = entry.facts().ok_or_else(gone)?.clone();
            // What has expired is gone, even if the loop has not come by yet: the shim's own timer may be at it.
            let expired =
                facts.expires_at.is_some_and(|at| at <= self.clock.now()) && !entry.outlives_expiry();
            if expired || ask(request, state) != Verdict::Accept {
                return Err(gone());
            }
            change(&mut facts)?;
            if entry.observed.is_some() {
                return match self.runtime.update_facts(id, &facts).await {
                    Ok(observed) => {
                        let _change = self.changing(id);
                        self.index.observe(observed);
                        Ok(())
                    }
                    Err(e) if e.kind == RuntimeErrorKind::NotFound => Err(gone()),
                    Err(e) => Err(EngineError::OperationFailed { operation: "update", error: Arc::new(e) }),
                };
            }
            let Some(intent) = entry.intent.as_deref() else { return Err(gone()) };
            let Operation::Create(create) = &intent.operation else { return Err(gone()) };
            let create = Create { facts, ..create.as_ref().clone() };
            let next = Intent {
                generation: intent.generation + 1,
                operation: Operation::Create(Box::new(create)),
                ..intent.clone()
            };
            if self.advance(Some(intent.generation), next, None).await? == Advance::Written {
                self.poke(id);
                return Ok(());
            }
            tokio::time::sleep(AFTER_LOST_RACE).await;
        }
        Err(EngineError::Contended)
    }

    /// Removes what has expired. Under the facts lock, so that a confirmed renewal wins; when somebody holds it, the next pass comes
    /// by again, so that one busy sandbox does not hold up the others.
    pub(super) async fn expire(self: &Arc<Self>, id: SandboxId) -> Result<(), EngineError> {
        let Ok(_facts) = self.facts_lock(id).try_lock() else { return Ok(()) };
        let (due, _) = self.index.expiring(self.clock.now(), self.settings.failed_create_retention);
        if !due.contains(&id) {
            return Ok(());
        }
        let state = self.index.get(id).and_then(|entry| entry.status()).map(|status| status.state);
        if matches!(state, Some(State::Pausing | State::Resuming)) {
            // What is in the middle of something is dealt with afterwards; that has a deadline of its own.
            return Ok(());
        }
        self.remove_expired(id).await
    }

    /// Removes what has expired, whose facts lock the caller holds.
    pub(super) async fn remove_expired(self: &Arc<Self>, id: SandboxId) -> Result<(), EngineError> {
        match self.want_removed(id, RemoveReason::Expired).await {
            Err(EngineError::Store(error)) => self.remove_unrecorded(id, error).await,
            committed => committed.map(drop),
        }
    }

    /// Removes what has expired although the store cannot be written. No intent is needed to find it again: the box itself says that its
    /// time is over, to the next pass and to the next server.
    async fn remove_unrecorded(
        self: &Arc<Self>,
        id: SandboxId,
        error: StoreError,
    ) -> Result<(), EngineError> {
        let idle = self.index.get(id).is_some_and(|e| e.intent.is_none() && e.observed.is_some());
        if !idle || self.reachable().is_err() {
            return Err(error.into());
        }
        warn!(sandbox = %id, %error, "the store cannot be written; what has expired goes all the same");
        let looked = self.index.get(id).and_then(|entry| self.looks(&entry));
        {
            let _working = self.working_on(id);
            let removed = self.runtime.remove(id, self.settings.stop_grace).await;
            removed.map_err(|e| EngineError::OperationFailed { operation: "remove", error: Arc::new(e) })?;
            self.vanished(id);
        }
        self.ended(id, looked, RemoveReason::Expired.word()).await;
        Ok(())
    }
}
