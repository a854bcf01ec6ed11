//! The engine: commits what is wanted, drives the runtime towards it, and answers what is.
//!
//! Owns the open intents and the in-memory index. Does not own what exists: that is the runtime's knowledge, merged here with the
//! intents by the pure functions of `sandglass_sandbox::lifecycle`.
//!
//! Invariants: an intent is written before the runtime is touched; one task at a time works on a sandbox ([`driver`]); mutable facts
//! (expiry, metadata) change only under the sandbox's facts lock, which expiry takes too, so a renewal that was confirmed is never lost.

mod breaker;
pub mod commit;
mod driver;
mod ending;
pub mod extend;
pub mod history;
pub mod index;
pub mod loops;
pub mod policies;
pub mod pools;
mod pre_stop;
pub mod provision;
pub mod snapshots;
pub mod stages;
mod stripes;
mod waits;
mod wake;
mod written;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{
    Clock, SandboxId,
    lifecycle::intent::Operation,
    ports::{
        Runtime, Store, StoreError,
        runtime::{Condition, Observation, RuntimeError},
    },
    spec::Secrets,
};
use tokio::sync::{Semaphore, watch};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use history::Journal;
use index::{Index, News};
use pools::Pools;
use snapshots::Snapshots;

/// Numbers the engine works by.
#[derive(Debug, Clone)]
pub struct Settings {
    /// How long a create request waits for the box before it is answered `Pending`.
    pub create_grace: Duration,
    /// When a create that has not succeeded has failed; covers slow pulls.
    pub create_deadline: Duration,
    /// When a pause or resume has failed.
    pub freeze_deadline: Duration,
    /// How long a delete request waits before it is answered with an error while the removal goes on.
    pub delete_patience: Duration,
    /// Pause between attempts to remove a box.
    pub remove_retry: Duration,
    /// How long a box may take to end by itself when it is removed.
    pub stop_grace: Duration,
    /// A create from a repository that is not ready has failed; covers the build of its image.
    pub provision_deadline: Duration,
    /// What is left of the box of such a sandbox when it failed is removed after this time.
    pub failed_box_retention: Duration,
    /// A failed create without expiry is forgotten after this time.
    pub failed_create_retention: Duration,
    /// History and idempotency keys older than this are forgotten.
    pub history_retention: Duration,
    /// A snapshot that is not made by then has failed; counts from its request.
    pub snapshot_deadline: Duration,
    /// A half-made box that no create is working on is removed after this time.
    pub orphan_grace: Duration,
    /// The whole list is compared with the runtime this often.
    pub resync_every: Duration,
    /// Boxes being started at the same time; more only wait inside the kernel.
    pub parallel_starts: usize,
    /// Sandboxes that may exist at once; 0 means no cap.
    pub max_sandboxes: usize,
    /// When sandboxes of a kind that does not become ready are not tried any more.
    pub breaker: sandglass_sandbox::breaker::Limits,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            create_grace: Duration::from_secs(2),
            create_deadline: Duration::from_secs(900),
            freeze_deadline: Duration::from_secs(30),
            delete_patience: Duration::from_secs(60),
            remove_retry: Duration::from_secs(30),
            stop_grace: Duration::ZERO,
            provision_deadline: Duration::from_secs(2700),
            failed_box_retention: Duration::from_secs(600),
            failed_create_retention: Duration::from_secs(3600),
            history_retention: Duration::from_secs(7 * 24 * 3600),
            snapshot_deadline: Duration::from_secs(900),
            orphan_grace: Duration::from_secs(60),
            resync_every: Duration::from_secs(30),
            parallel_starts: 6,
            max_sandboxes: 0,
            breaker: sandglass_sandbox::breaker::Limits::default(),
        }
    }
}

/// Sandboxes share this many locks; a shared one only costs a short wait.
const FACTS_LOCKS: usize = 1024;

/// See the module documentation. Shared as `Arc<Engine>`.
pub struct Engine {
    runtime: Arc<dyn Runtime>,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    index: Index,
    journal: Journal,
    snapshots: Snapshots,
    pools: Pools,
    drivers: Mutex<HashMap<SandboxId, Arc<tokio::sync::Notify>>>,
    /// Secrets of creates in flight. Memory only, dropped when the create is over.
    secrets: Mutex<HashMap<SandboxId, Arc<Secrets>>>,
    /// Boxes whose driver is calling the runtime: its answer alone says what came of it, together with the history.
    working: Mutex<HashSet<SandboxId>>,
    /// Why the runtime cannot be reached at the moment.
    lost: watch::Sender<Option<Arc<RuntimeError>>>,
    facts_locks: Box<[tokio::sync::Mutex<()>]>,
    starting: Semaphore,
    tasks: TaskTracker,
    stopping: CancellationToken,
    /// Whoever reads along is to end.
    closing: CancellationToken,
    removed_hook: std::sync::OnceLock<RemovedHook>,
    created_hook: std::sync::OnceLock<CreatedHook>,
    describe_hook: std::sync::OnceLock<DescribeHook>,
    timed_hook: std::sync::OnceLock<stages::TimedHook>,
    stages: stages::Stages,
    provisioner: std::sync::OnceLock<Arc<dyn provision::Provisioner>>,
    /// The way to the agents in the boxes.
    inside: std::sync::OnceLock<(Arc<dyn crate::builds::inside::Inside>, std::net::IpAddr)>,
    /// What is known of the use of sandboxes with policies.
    book: policies::Book,
}

/// Told of every create that came to an end, with the phase in which it failed.
type CreatedHook = Box<dyn Fn(Option<&str>) + Send + Sync>;

/// See [`Engine::describe_with`].
type DescribeHook = Box<dyn Fn(&index::Entry) -> Option<String> + Send + Sync>;

/// See [`Engine::working_on`].
struct Working<'a>(&'a Engine, SandboxId);

impl Drop for Working<'_> {
    fn drop(&mut self) {
        self.0.working().remove(&self.1);
    }
}

/// Told of every box that is gone, before its address can be given to another.
type RemovedHook = Box<dyn Fn(&sandglass_sandbox::ports::runtime::Observation) + Send + Sync>;

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("runtime", &self.runtime.name()).finish_non_exhaustive()
    }
}

/// Why the engine could not come up.
#[derive(Debug, thiserror::Error)]
pub enum RecoverError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("the runtime cannot list its sandboxes: {0}")]
    Runtime(#[from] RuntimeError),
}

impl Engine {
    /// Builds an engine that knows nothing yet; call [`Engine::recover`] before serving.
    pub fn new(
        runtime: Arc<dyn Runtime>,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        settings: Settings,
    ) -> Arc<Self> {
        Arc::new(Self {
            starting: Semaphore::new(settings.parallel_starts.max(1)),
            runtime,
            store,
            clock,
            settings,
            index: Index::default(),
            journal: Journal::default(),
            snapshots: Snapshots::default(),
            pools: Pools::default(),
            drivers: Mutex::default(),
            secrets: Mutex::default(),
            working: Mutex::default(),
            lost: watch::Sender::new(None),
            facts_locks: (0..FACTS_LOCKS).map(|_| tokio::sync::Mutex::new(())).collect(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
            closing: CancellationToken::new(),
            removed_hook: std::sync::OnceLock::new(),
            created_hook: std::sync::OnceLock::new(),
            describe_hook: std::sync::OnceLock::new(),
            timed_hook: std::sync::OnceLock::new(),
            stages: stages::Stages::default(),
            provisioner: std::sync::OnceLock::new(),
            inside: std::sync::OnceLock::new(),
            book: policies::Book::default(),
        })
    }

    /// Learns what exists and what was in flight, starts the loops, and resumes the open intents.
    ///
    /// # Errors
    /// When the store or the runtime cannot be read: serving would mean guessing.
    pub async fn recover(self: &Arc<Self>) -> Result<(), RecoverError> {
        // Watch first, so that nothing happens unseen between the list and the watch.
        loops::observe::spawn(self);
        self.recall_pools().await?;
        match self.runtime.list().await {
            Ok(listed) => listed.into_iter().for_each(|observed| {
                if observed.spec.standby.is_some() {
                    self.observe_warm(observed);
                } else {
                    self.index.observe(observed);
                }
            }),
            // It may come back; until then reads say that nothing is known.
            Err(error) if error.retryable() => self.lose(error),
            Err(error) => return Err(error.into()),
        }
        let intents = self.store.open_intents().await?;
        let open: Vec<_> = intents.iter().map(|i| i.sandbox_id).collect();
        self.recall_announced(&open).await?;
        for intent in intents {
            self.recall_wait(&intent).await?;
            self.index.set_intent(intent);
        }
        for (id, facts) in self.provisioner().map(|p| p.known()).unwrap_or_default() {
            self.index.set_agent(id, facts);
        }
        self.recall_usages().await?;
        for id in open {
            self.poke(id);
        }
        snapshots::spawn(self);
        pools::spawn(self);
        loops::expire::spawn(self);
        loops::policies::spawn(self);
        loops::orphans::spawn(self);
        loops::resync::spawn(self);
        loops::prune::spawn(self);
        Ok(())
    }

    /// Ends the loops and drivers. Sandboxes and open intents stay as they are.
    pub async fn stop(&self) {
        self.closing.cancel();
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Ends whoever reads along, so that the connections can be drained.
    pub fn close_streams(&self) {
        self.closing.cancel();
    }

    /// Cancelled when nobody is to read along any longer.
    pub fn closing(&self) -> &CancellationToken {
        &self.closing
    }

    /// Registers who is told of boxes that are gone. The first call counts.
    pub fn on_removed(
        &self,
        hook: impl Fn(&sandglass_sandbox::ports::runtime::Observation) + Send + Sync + 'static,
    ) {
        let _ = self.removed_hook.set(Box::new(hook));
    }

    /// Takes an observation into the index, unless it shows a box that is held still while it is copied, or let go afterwards: that is
    /// nobody's wish, and the end of the copy sees to it that what was wished for holds.
    fn observe(&self, observed: Observation) -> News {
        if observed.spec.standby.is_some() {
            self.observe_warm(observed);
            return News::Stale;
        }
        self.forget_warm(observed.id);
        let up = |condition: &Condition| matches!(condition, Condition::Running | Condition::Paused);
        if self.snapshots.copies(observed.id) && up(&observed.condition) {
            let known = self.index.get(observed.id).and_then(|e| e.observed);
            if known.is_some_and(|k| up(&k.condition) && k.condition != observed.condition) {
                return News::Stale;
            }
        }
        if let Some(provisioner) = self.provisioner() {
            provisioner.condition(observed.id, &observed.condition);
        }
        self.index.observe(observed)
    }

    /// Registers who is told of creates that came to an end: `None` for success, else the phase that failed. The first call counts.
    pub fn on_created(&self, hook: impl Fn(Option<&str>) + Send + Sync + 'static) {
        let _ = self.created_hook.set(Box::new(hook));
    }

    /// Registers the way into sandboxes, for hooks that the server runs. `host`: whose ports lead into those without an address of their
    /// own. The first call counts.
    pub fn speak_through(&self, inside: Arc<dyn crate::builds::inside::Inside>, host: std::net::IpAddr) {
        let _ = self.inside.set((inside, host));
    }

    /// The way to the agent of a box; `None` when there is none from here.
    pub(crate) fn door(&self, observed: &Observation) -> Option<crate::builds::inside::Door> {
        let (_, host) = self.inside.get()?;
        crate::builds::inside::Door::of(observed, *host)
    }

    fn created(&self, failed_phase: Option<&str>) {
        if let Some(hook) = self.created_hook.get() {
            hook(failed_phase);
        }
    }

    /// Takes the box out of the index and tells whoever wants to know.
    fn vanished(self: &Arc<Self>, id: SandboxId) -> bool {
        if self.forget_warm(id) {
            // Nothing comes of it unless a sandbox is wanted under its id.
            self.forget_agent_of(id);
        }
        let Some(observed) = self.index.vanished(id) else { return false };
        if let Some(hook) = self.removed_hook.get() {
            hook(&observed);
        }
        self.forget_agent_of(id);
        true
    }

    /// Whether what the index shows is known to be so.
    ///
    /// # Errors
    /// Why the runtime cannot be reached.
    pub fn reachable(&self) -> Result<(), Arc<RuntimeError>> {
        self.lost.borrow().clone().map_or(Ok(()), Err)
    }

    /// Waits until the runtime can be reached and what it told is known.
    pub async fn found(&self) {
        // Its sender is part of this.
        let _ = self.lost.subscribe().wait_for(Option::is_none).await;
    }

    fn lose(&self, error: RuntimeError) {
        tracing::warn!(%error, "the runtime cannot be reached");
        self.lost.send_replace(Some(Arc::new(error)));
    }

    /// The runtime is back and the index holds what it told: whatever waited for it goes on now.
    fn found_again(self: &Arc<Self>) {
        if self.lost.send_replace(None).is_none() {
            return;
        }
        tracing::info!("the runtime is back");
        for intent in self.index.intents() {
            match intent.operation {
                Operation::Remove { reason, not_before: Some(_), .. } => {
                    // What failed for want of a runtime need not wait for the rest of its pause.
                    let (engine, id) = (self.clone(), intent.sandbox_id);
                    self.tasks.spawn(async move {
                        if let Err(error) = engine.want_removed(id, reason).await {
                            tracing::warn!(sandbox = %id, %error, "a removal waits for its next attempt");
                        }
                    });
                }
                _ => self.poke(intent.sandbox_id),
            }
        }
        self.snapshots.look();
    }

    /// What exists, as this process knows it.
    pub fn index(&self) -> &Index {
        &self.index
    }

    /// The runtime, for reads that have no state (logs, usage).
    pub fn runtime(&self) -> &Arc<dyn Runtime> {
        &self.runtime
    }

    /// The store, for history.
    pub fn store(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The clock everything is judged by.
    pub fn clock(&self) -> &Arc<dyn Clock> {
        &self.clock
    }

    fn facts_lock(&self, id: SandboxId) -> &tokio::sync::Mutex<()> {
        stripes::of(&self.facts_locks, id)
    }

    fn working(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.working.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The driver of this sandbox is at work until the answer is dropped.
    fn working_on(&self, id: SandboxId) -> Working<'_> {
        self.working().insert(id);
        Working(self, id)
    }

    fn secrets(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Secrets>>> {
        self.secrets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
