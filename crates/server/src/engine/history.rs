//! The history of sandboxes: the one place of the engine that writes it, and who is woken when it grew.
//!
//! Owns the bells of those who read along and the counters by which they know that an entry and a place in the history belong
//! together. Does not own the lines: the store does.
//!
//! Invariants: every line is written through here, inside a [`Change`] that also covers what the index shows of it; a reader never holds
//! up a writer, it looks again when something changed while it looked.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::intent::{Create, Intent, Operation, Progress},
    ports::store::{Advance, EventRecord, HistoryBounds, SequencedEvent, StoreError},
};
use tokio::sync::watch;
use tracing::warn;

use super::{Engine, index::Entry, pools, provision::READY, stripes, waits};

/// Sandboxes share this many counters; a shared one only makes a reader look twice.
const STRIPES: usize = 256;
/// Pause before a reader looks again at a sandbox that was changing.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// The kind of the line that says whose sandbox it was. Never shown.
pub const OWNER: &str = "owner";
/// Lines about a box's egress policy are written when they happen, unlike others that its own record holds.
pub const OF_EGRESS: &str = "egress.";
/// The kind of the line after which nothing of the sandbox is left.
pub const REMOVED: &str = "removed";
/// The kind of the line that says that a sandbox lives until another time: that time, and perhaps why.
pub const RENEWED: &str = "renewed";
/// The kind of the line that says how a sandbox looked when it was ready, when it failed, or before it went. Never shown.
pub const RECORD: &str = "record";
/// Lines among which the owner's is looked for; it is one of the first two.
const OPENING_LINES: u32 = 16;

#[derive(Debug, Default)]
struct Counter {
    begun: AtomicU64,
    ended: AtomicU64,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Journal {
    bells: Mutex<HashMap<SandboxId, watch::Sender<()>>>,
    counters: Box<[Counter]>,
    /// Sandboxes whose create is open and whose first line is written already.
    announced: Mutex<HashSet<SandboxId>>,
    /// Held while a first line is written, so that there is one of it, whoever is first and whoever gives up.
    announcing: Box<[tokio::sync::Mutex<()>]>,
    /// Builds that creates wait for, as far as that is written.
    waits: Mutex<waits::Waits>,
    /// Something was written, of any sandbox.
    grown: tokio::sync::Notify,
}

impl Default for Journal {
    fn default() -> Self {
        Self {
            bells: Mutex::default(),
            counters: (0..STRIPES).map(|_| Counter::default()).collect(),
            announced: Mutex::default(),
            announcing: (0..STRIPES).map(|_| tokio::sync::Mutex::new(())).collect(),
            waits: Mutex::default(),
            grown: tokio::sync::Notify::new(),
        }
    }
}

impl Journal {
    fn bells(&self) -> MutexGuard<'_, HashMap<SandboxId, watch::Sender<()>>> {
        self.bells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn announced(&self) -> MutexGuard<'_, HashSet<SandboxId>> {
        self.announced.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn waits(&self) -> MutexGuard<'_, waits::Waits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn counter(&self, id: SandboxId) -> &Counter {
        stripes::of(&self.counters, id)
    }

    /// The first line of this sandbox need not be written again.
    pub(super) fn mark_announced(&self, id: SandboxId) {
        self.announced().insert(id);
    }

    /// The create is over.
    pub(super) fn forget(&self, id: SandboxId) {
        self.announced().remove(&id);
        self.waits().end(id);
    }
}

/// The history and the index of a sandbox are being changed, for as long as this lives. Ends by waking who reads along.
#[derive(Debug)]
pub(super) struct Change<'a> {
    journal: &'a Journal,
    id: SandboxId,
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.journal.counter(self.id).ended.fetch_add(1, Ordering::SeqCst);
        if let Some(bell) = self.journal.bells().get(&self.id) {
            bell.send_replace(());
        }
        self.journal.grown.notify_one();
    }
}

/// Wakes when the history of one sandbox may have grown. Keeps no lines, so it costs the same however slow its owner is.
#[derive(Debug)]
pub struct Bell {
    engine: std::sync::Arc<Engine>,
    id: SandboxId,
    rings: Option<watch::Receiver<()>>,
}

impl Bell {
    /// Waits for the first ring since the last call, or since the bell was hung up.
    pub async fn rung(&mut self) {
        let alive = match &mut self.rings {
            Some(rings) => rings.changed().await.is_ok(),
            None => false,
        };
        if !alive {
            // Its sender is removed only after its last receiver.
            std::future::pending::<()>().await;
        }
    }
}

impl Drop for Bell {
    fn drop(&mut self) {
        let mut bells = self.engine.journal.bells();
        self.rings = None;
        if bells.get(&self.id).is_some_and(|bell| bell.receiver_count() == 0) {
            bells.remove(&self.id);
        }
    }
}

/// An entry and the place in the history that it shows: every line up to `seq` is in it.
#[derive(Debug)]
pub struct Moment {
    pub entry: Option<Entry>,
    /// 0 when nothing is written yet.
    pub seq: u64,
    pub bounds: Option<HistoryBounds>,
}

/// The lines that begin a history: the accepted create, written with its outcome or before its first progress.
fn opening(create: &Create, at: Timestamp) -> Vec<EventRecord> {
    let message = match create.spec.source.as_ref().and_then(|source| source.repositories.first()) {
        Some(repository) => format!("repository {}", repository.url),
        None => format!("image {}", create.spec.image),
    };
    let mut lines = vec![EventRecord { at, kind: "accepted".into(), message }];
    if let Some(tenant) = &create.spec.tenant {
        lines.push(EventRecord { at, kind: OWNER.into(), message: tenant.clone() });
    }
    if let Some(origin) = &create.origin {
        let (kind, message) = pools::line(origin);
        lines.push(EventRecord { at, kind: kind.into(), message });
    }
    lines
}

impl Engine {
    /// From here until the answer is dropped, readers of this sandbox's history look again.
    pub(super) fn changing(&self, id: SandboxId) -> Change<'_> {
        self.journal.counter(id).begun.fetch_add(1, Ordering::SeqCst);
        Change { journal: &self.journal, id }
    }

    /// A line of history, now.
    pub(super) fn event(&self, kind: &str, message: &str) -> EventRecord {
        EventRecord { at: self.clock.now(), kind: kind.into(), message: message.into() }
    }

    /// Writes lines that go with no intent.
    pub(super) async fn append(&self, id: SandboxId, events: &[EventRecord]) -> Result<(), StoreError> {
        let _change = self.changing(id);
        self.store.append(id, events).await
    }

    /// Writes a line that may be lost when the store fails.
    pub(super) async fn note(&self, id: SandboxId, kind: &str, message: &str) {
        if let Err(error) = self.append(id, &[self.event(kind, message)]).await {
            warn!(sandbox = %id, kind, %error, "an event could not be recorded");
        }
    }

    /// Replaces the intent in the store and, when that won its race, in the index.
    pub(super) async fn advance(
        &self,
        expected: Option<u64>,
        intent: Intent,
        event: Option<&EventRecord>,
    ) -> Result<Advance, StoreError> {
        let _change = self.changing(intent.sandbox_id);
        let done = self.store.advance(expected, &intent, event).await?;
        if done == Advance::Written {
            self.index.set_intent(intent);
        }
        Ok(done)
    }

    /// Closes the intent in the store and in the index, with its last lines. A lost race means that a newer intent is in the
    /// index already; the next look finds it.
    pub(super) async fn close(
        &self,
        id: SandboxId,
        generation: u64,
        events: &[EventRecord],
    ) -> Result<Advance, StoreError> {
        let _change = self.changing(id);
        let done = self.store.close(id, generation, events).await?;
        if done == Advance::Written {
            self.index.clear_intent(id, generation);
        }
        Ok(done)
    }

    /// Writes the first line of a create, unless it is written.
    pub(super) async fn announce(&self, id: SandboxId, create: &Create, accepted_at: Timestamp) {
        let _writing = stripes::of(&self.journal.announcing, id).lock().await;
        // Whoever closed or failed the create meanwhile has written it.
        let open = self.index.get(id).and_then(|e| e.intent).is_some_and(|intent| {
            matches!(&intent.operation, Operation::Create(create)
                if !matches!(create.progress, Progress::Failed { .. }))
        });
        if !open || self.journal.announced().contains(&id) {
            return;
        }
        match self.append(id, &opening(create, accepted_at)).await {
            Ok(()) => self.journal.mark_announced(id),
            Err(error) => warn!(sandbox = %id, %error, "an event could not be recorded"),
        }
    }

    /// Closes a create that succeeded, with its first line if it is not written yet: the usual create writes its history at once.
    pub(super) async fn close_created(
        &self,
        id: SandboxId,
        intent: &Intent,
        create: &Create,
    ) -> Result<(), StoreError> {
        let _writing = stripes::of(&self.journal.announcing, id).lock().await;
        let announced = self.journal.announced().contains(&id);
        let mut lines = if announced { Vec::new() } else { opening(create, intent.accepted_at) };
        let (kind, message) = match create.spec.source {
            Some(_) => (READY, "the sandbox is ready"),
            None => ("running", "the sandbox is up"),
        };
        lines.push(self.event(kind, message));
        if create.spec.source.is_some() {
            // Its box may go while no server looks, and with that who knows what it was.
            lines.extend(self.index.get(id).and_then(|entry| self.looks(&entry)));
        }
        self.kind_ready(&create.spec).await?;
        if self.close(id, intent.generation, &lines).await? == Advance::Written {
            self.journal.mark_announced(id);
            self.created(None);
            self.came_up(id, intent, create);
        }
        Ok(())
    }

    /// After a restart: which of the open creates have their first line already.
    pub(super) async fn recall_announced(&self, open: &[SandboxId]) -> Result<(), StoreError> {
        for id in open {
            if self.store.history_bounds(*id).await?.is_some() {
                self.journal.mark_announced(*id);
            }
        }
        Ok(())
    }

    /// Reads along with the history of a sandbox from now on.
    pub fn listen(self: &std::sync::Arc<Self>, id: SandboxId) -> Bell {
        let mut bells = self.journal.bells();
        let rings = bells.entry(id).or_insert_with(|| watch::Sender::new(())).subscribe();
        drop(bells);
        Bell { engine: self.clone(), id, rings: Some(rings) }
    }

    /// Waits until the history of any sandbox may have grown since the last call. For one caller.
    pub async fn history_grown(&self) {
        self.journal.grown.notified().await;
    }

    /// How many sandboxes somebody reads along with.
    pub fn listened_to(&self) -> usize {
        self.journal.bells().len()
    }

    /// The sandbox as it is, and the place in its history up to which that is told. Whoever listens since before and reads on from
    /// there misses nothing and hears nothing twice.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn moment(&self, id: SandboxId) -> Result<Moment, StoreError> {
        let counter = self.journal.counter(id);
        loop {
            let begun = counter.begun.load(Ordering::SeqCst);
            if counter.ended.load(Ordering::SeqCst) == begun {
                let bounds = self.store.history_bounds(id).await?;
                let entry = self.index.get(id).filter(|e| e.status().is_some());
                if counter.begun.load(Ordering::SeqCst) == begun {
                    return Ok(Moment { entry, seq: bounds.map_or(0, |b| b.last), bounds });
                }
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }

    /// Whether everything after `seq` is still kept: the line itself is, or nothing was ever dropped.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn keeps_after(&self, id: SandboxId, seq: u64) -> Result<bool, StoreError> {
        let next = self.store.history_after(id, seq.saturating_sub(1), 1).await?;
        Ok(match (seq, next.first()) {
            (0, first) => first.is_none_or(|line| line.event.kind == "accepted"),
            (seq, Some(line)) => line.seq == seq,
            (_, None) => false,
        })
    }

    /// A part of the history, without the lines that are the server's own.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn lines_after(
        &self,
        id: SandboxId,
        seq: u64,
        limit: u32,
    ) -> Result<Vec<SequencedEvent>, StoreError> {
        self.store.history_after(id, seq, limit).await
    }

    /// Whose sandbox it was, as far as its history still tells.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn past_owner(&self, id: SandboxId) -> Result<Option<String>, StoreError> {
        let lines = self.store.history_after(id, 0, OPENING_LINES).await?;
        Ok(lines.into_iter().find(|l| l.event.kind == OWNER).map(|l| l.event.message))
    }
}
