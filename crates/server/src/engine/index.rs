//! What this process knows: one entry per sandbox, merged from intents and observations. Rebuilt at start, never saved.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard},
};

use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    lifecycle::{
        boot::AgentFacts,
        intent::{Intent, Operation, Progress},
        state::{self, Status},
    },
    policy::Action,
    ports::runtime::{Condition, Observation, RuntimeError},
    spec::{MutableFacts, Spec},
};
use tokio::sync::watch;

/// The extension by which a request names a pool.
const POOL_REF: &str = "poolRef";

/// All that is known about one sandbox.
#[derive(Debug, Clone)]
pub struct Entry {
    pub id: SandboxId,
    pub intent: Option<Arc<Intent>>,
    pub observed: Option<Arc<Observation>>,
    /// What its agent told, of a sandbox that is made from a repository.
    pub agent: Option<Arc<AgentFacts>>,
    /// How the last operation failed, and which intent generation that was.
    pub failure: Option<(u64, Arc<RuntimeError>)>,
    /// The highest generation this process has seen, so that no two intents of it share one.
    last_generation: u64,
}

impl Entry {
    fn new(id: SandboxId) -> Self {
        Self { id, intent: None, observed: None, agent: None, failure: None, last_generation: 0 }
    }

    /// The public status; `None` when the entry stands for nothing.
    pub fn status(&self) -> Option<Status> {
        state::compute(self.intent.as_deref(), self.observed.as_deref(), self.agent.as_deref())
    }

    fn create(&self) -> Option<&sandglass_sandbox::lifecycle::intent::Create> {
        match &self.intent.as_deref()?.operation {
            Operation::Create(create) => Some(create),
            _ => None,
        }
    }

    /// What was asked for; unknown only for a removal whose box is already gone.
    pub fn spec(&self) -> Option<&Spec> {
        self.observed.as_deref().map(|o| &o.spec).or_else(|| self.create().map(|c| &c.spec))
    }

    /// The tenant it belongs to; `None` also while nothing but a removal is known of it.
    pub fn tenant(&self) -> Option<&str> {
        self.spec()?.tenant.as_deref()
    }

    /// The pool that its request named.
    pub fn pool(&self) -> Option<&str> {
        let named = self.spec()?.extensions.get(POOL_REF)?.trim();
        (!named.is_empty()).then_some(named)
    }

    /// Expiry and metadata, from whoever owns them now.
    pub fn facts(&self) -> Option<&MutableFacts> {
        self.observed.as_deref().map(|o| &o.facts).or_else(|| self.create().map(|c| &c.facts))
    }

    /// When it was created.
    pub fn created_at(&self) -> Timestamp {
        let accepted = self.intent.as_deref().map(|i| i.accepted_at);
        self.observed.as_deref().map(|o| o.created_at).or(accepted).unwrap_or(Timestamp::clamped(0))
    }

    /// The argument vector: as observed, else as asked for.
    pub fn entrypoint(&self) -> Vec<String> {
        use sandglass_sandbox::spec::Entrypoint;
        if let Some(observed) = &self.observed {
            return observed.entrypoint.clone();
        }
        match self.create().map(|c| &c.spec.entrypoint) {
            Some(Entrypoint::Command(argv)) => argv.clone(),
            _ => Vec::new(),
        }
    }

    /// The agent's and the route's token.
    pub fn tokens(&self) -> Option<(&str, &str)> {
        self.observed
            .as_deref()
            .map(|o| (o.agent_token.as_str(), o.route_token.as_str()))
            .or_else(|| self.create().map(|c| (c.agent_token.as_str(), c.route_token.as_str())))
    }

    /// Whether it is made from a repository and has no box yet.
    pub(super) fn is_awaited(&self) -> bool {
        self.create().is_some_and(|create| create.spec.source.is_some())
            && self.observed.as_ref().is_none_or(|observed| observed.condition == Condition::Starting)
    }

    /// Whether its create is open and has not failed.
    pub(super) fn is_being_made(&self) -> bool {
        self.create().is_some_and(|create| !matches!(create.progress, Progress::Failed { .. }))
    }

    pub(super) fn generation(&self) -> Option<u64> {
        self.intent.as_deref().map(|i| i.generation)
    }

    /// The generation of the next intent.
    pub(super) fn next_generation(&self) -> u64 {
        self.last_generation + 1
    }

    pub(super) fn removing(&self) -> bool {
        matches!(self.intent.as_deref().map(|i| &i.operation), Some(Operation::Remove { .. }))
    }
}

/// Concurrent map of entries with change notification.
#[derive(Debug)]
pub struct Index {
    entries: RwLock<HashMap<SandboxId, Entry>>,
    changed: watch::Sender<u64>,
    /// The last sandboxes that went away: what was observed of them before may still be under way.
    gone: Mutex<VecDeque<SandboxId>>,
}

/// How many departed sandboxes are remembered.
const REMEMBERED_GONE: usize = 1024;

impl Default for Index {
    fn default() -> Self {
        Self { entries: RwLock::default(), changed: watch::Sender::new(0), gone: Mutex::default() }
    }
}

/// What an observation told that was not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    /// Nothing, or older than what is known.
    Stale,
    Appeared,
    ConditionChanged,
    FactsChanged,
}

impl Index {
    fn read(&self) -> RwLockReadGuard<'_, HashMap<SandboxId, Entry>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<SandboxId, Entry>> {
        self.entries.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn gone(&self) -> MutexGuard<'_, VecDeque<SandboxId>> {
        self.gone.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn touch(&self) {
        self.changed.send_modify(|v| *v += 1);
    }

    /// The entry of a sandbox that exists.
    pub fn get(&self, id: SandboxId) -> Option<Entry> {
        self.read().get(&id).cloned()
    }

    /// How many sandboxes there are.
    pub fn len(&self) -> usize {
        self.read().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Every entry, newest first, ties broken by id so that pages are stable.
    pub fn newest_first(&self) -> Vec<Entry> {
        let mut all: Vec<_> = self.read().values().cloned().collect();
        all.sort_unstable_by_key(|e| (std::cmp::Reverse(e.created_at()), e.id));
        all
    }

    /// How many sandboxes are in each state, for metrics and the readiness page.
    pub fn census(&self) -> BTreeMap<&'static str, usize> {
        let mut counts = BTreeMap::new();
        for entry in self.read().values() {
            if let Some(status) = entry.status() {
                *counts.entry(status.state.word()).or_default() += 1;
            }
        }
        counts
    }

    /// How many operations are under way, for metrics.
    pub fn open_intents(&self) -> usize {
        self.read().values().filter(|entry| entry.intent.is_some()).count()
    }

    /// Counts the changes: whoever follows looks again when it moves.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Waits until `answer` finds one, looking again after every change. The caller bounds the time.
    pub async fn wait_for<T>(&self, id: SandboxId, mut answer: impl FnMut(Option<&Entry>) -> Option<T>) -> T {
        let mut changed = self.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if let Some(found) = answer(self.read().get(&id)) {
                return found;
            }
            if changed.changed().await.is_err() {
                // The sender lives in `self`; it cannot be gone while we borrow it.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Whether the box went away lately.
    pub(super) fn is_gone(&self, id: SandboxId) -> bool {
        self.gone().contains(&id)
    }

    /// What is still told of the box is old.
    pub(super) fn remember_gone(&self, id: SandboxId) {
        let mut gone = self.gone();
        gone.push_back(id);
        if gone.len() > REMEMBERED_GONE {
            gone.pop_front();
        }
    }

    /// How many sandboxes name each pool.
    pub(super) fn allocated(&self) -> BTreeMap<String, u64> {
        let mut counts = BTreeMap::new();
        for entry in self.read().values() {
            if let Some(pool) = entry.pool() {
                *counts.entry(pool.to_owned()).or_default() += 1;
            }
        }
        counts
    }

    pub(super) fn observe(&self, observed: Observation) -> News {
        let mut entries = self.write();
        if self.gone().contains(&observed.id) {
            return News::Stale;
        }
        let entry = entries.entry(observed.id).or_insert_with(|| Entry::new(observed.id));
        let news = match &entry.observed {
            Some(known) if known.revision >= observed.revision => return News::Stale,
            Some(known) if known.condition != observed.condition => News::ConditionChanged,
            Some(known) if known.facts != observed.facts => News::FactsChanged,
            Some(_) => News::Stale,
            None => News::Appeared,
        };
        entry.observed = Some(Arc::new(observed));
        drop(entries);
        self.touch();
        news
    }

    /// The box is gone. Returns what was last known of it.
    pub(super) fn vanished(&self, id: SandboxId) -> Option<Arc<Observation>> {
        let mut entries = self.write();
        let entry = entries.get_mut(&id)?;
        let known = entry.observed.take();
        // A create that is still wanted makes the box again under the same id.
        if entry.create().is_none() {
            self.remember_gone(id);
        }
        if entries.get(&id).is_some_and(|e| e.intent.is_none()) {
            entries.remove(&id);
        }
        drop(entries);
        self.touch();
        known
    }

    pub(super) fn set_intent(&self, intent: Intent) {
        let id = intent.sandbox_id;
        let mut entries = self.write();
        let entry = entries.entry(id).or_insert_with(|| Entry::new(id));
        entry.last_generation = entry.last_generation.max(intent.generation);
        entry.intent = Some(Arc::new(intent));
        drop(entries);
        self.touch();
    }

    /// Takes over what an agent told. Nothing is kept of an agent whose sandbox is not known.
    pub(super) fn set_agent(&self, id: SandboxId, facts: AgentFacts) {
        if let Some(entry) = self.write().get_mut(&id) {
            entry.agent = Some(Arc::new(facts));
        }
        self.touch();
    }

    /// Shows how far a create has come. Memory only: a restart begins at the first step, which is idempotent.
    pub(super) fn set_progress(&self, id: SandboxId, generation: u64, progress: Progress) {
        let mut entries = self.write();
        if let Some(intent) = entries.get_mut(&id).and_then(|e| e.intent.as_mut())
            && intent.generation == generation
            && let Operation::Create(create) = &mut Arc::make_mut(intent).operation
        {
            create.progress = progress;
        }
        drop(entries);
        self.touch();
    }

    pub(super) fn set_failure(&self, id: SandboxId, generation: u64, error: RuntimeError) {
        if let Some(entry) = self.write().get_mut(&id) {
            entry.failure = Some((generation, Arc::new(error)));
        }
        self.touch();
    }

    /// The intent is closed; an entry without a box disappears with it.
    pub(super) fn clear_intent(&self, id: SandboxId, generation: u64) {
        let mut entries = self.write();
        if let Some(entry) = entries.get_mut(&id)
            && entry.generation() == Some(generation)
        {
            entry.intent = None;
            if entry.observed.is_none() {
                entries.remove(&id);
            }
        }
        drop(entries);
        self.touch();
    }

    /// The operations in flight.
    pub(super) fn intents(&self) -> Vec<Arc<Intent>> {
        self.read().values().filter_map(|e| e.intent.clone()).collect()
    }

    /// Boxes that are being made, by an attempt that nothing is known of.
    pub(super) fn half_made(&self) -> Vec<SandboxId> {
        let half_made = |e: &&Entry| {
            e.intent.is_none() && e.observed.as_ref().is_some_and(|o| o.condition == Condition::Starting)
        };
        self.read().values().filter(half_made).map(|e| e.id).collect()
    }

    /// Whether a sandbox is made from the snapshot, or is about to be.
    pub(super) fn restored_from(&self, snapshot: SnapshotId) -> bool {
        self.read().values().any(|entry| {
            let failed = entry.create().is_some_and(|c| matches!(c.progress, Progress::Failed { .. }));
            (entry.observed.is_some() || !failed)
                && entry.spec().is_some_and(|spec| spec.snapshot == Some(snapshot))
        })
    }

    /// Boxes that exist by our knowledge and were observed before `revision`: what a full list must confirm.
    pub(super) fn boxes(&self) -> Vec<(SandboxId, u64)> {
        self.read().values().filter_map(|e| e.observed.as_ref().map(|o| (e.id, o.revision))).collect()
    }

    /// Sandboxes that were created with policies.
    pub(super) fn with_policies(&self) -> Vec<SandboxId> {
        self.read().values().filter(|e| e.policies().is_some() && !e.removing()).map(|e| e.id).collect()
    }

    /// Sandboxes whose time is over, and the earliest instant at which another one's will be.
    pub(super) fn expiring(
        &self,
        now: Timestamp,
        retention: std::time::Duration,
    ) -> (Vec<SandboxId>, Option<Timestamp>) {
        let (mut due, mut next) = (Vec::new(), None::<Timestamp>);
        for entry in self.read().values().filter(|e| !e.removing()) {
            let failed_at = entry.create().and_then(|c| match &c.progress {
                Progress::Failed { at, .. } => at.checked_add(retention),
                _ => None,
            });
            // Life begins with the box; until then the deadline of the create counts.
            if failed_at.is_none() && entry.is_awaited() {
                continue;
            }
            let expires_at = entry.facts().and_then(|f| f.expires_at);
            if expires_at.is_some() && entry.policies().is_some_and(|p| p.on_expire != Action::Terminate) {
                // Its policy says what happens then.
                continue;
            }
            let Some(at) = expires_at.or(failed_at) else { continue };
            if at <= now {
                due.push(entry.id);
            } else {
                next = Some(next.map_or(at, |n| n.min(at)));
            }
        }
        (due, next)
    }
}

/// Whether the box of an observation is up, frozen or not.
pub fn alive(observed: &Observation) -> bool {
    matches!(observed.condition, Condition::Running | Condition::Paused)
}

#[cfg(test)]
#[path = "index_tests.rs"]
mod tests;
