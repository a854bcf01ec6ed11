//! The store port: the facts the server owns. There is deliberately no table of sandboxes.

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::{
    breaker::Breaker,
    ids::{SandboxId, SnapshotId},
    lifecycle::intent::Intent,
    policy::Usage,
    pool::Pool,
    snapshot::{SnapshotRecord, SnapshotState},
    time::Timestamp,
};

/// Why the store could not answer.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("the store cannot be reached: {0}")]
    Unavailable(String),
    #[error("the store holds a row that cannot be read: {0}")]
    Corrupt(String),
}

/// Outcome of a conditional write. A lost race is a value, not an error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Advance {
    Written,
    /// Somebody else changed or closed the intent first.
    Lost,
}

/// One line of a sandbox's history.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventRecord {
    pub at: Timestamp,
    pub kind: String,
    pub message: String,
}

/// A history line with its place in the sandbox's history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SequencedEvent {
    /// Grows strictly within one sandbox, across its operations and server restarts; starts above 0.
    pub seq: u64,
    pub event: EventRecord,
}

/// Which part of a sandbox's history is kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryBounds {
    /// Sequence of the oldest line.
    pub first: u64,
    /// Sequence of the newest line.
    pub last: u64,
}

/// A sandbox of which nothing is left but its history.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EndedSandbox {
    pub sandbox_id: SandboxId,
    /// When it was gone.
    pub at: Timestamp,
    /// Why, as its last line says.
    pub reason: String,
    /// The tenant it belonged to.
    pub owner: Option<String>,
    /// How it looked, as written when it failed and before it went; oldest first, at least one.
    pub records: Vec<String>,
}

/// Which snapshots to list. Filters are joined by AND, states by OR; an empty list of states means all.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SnapshotFilter {
    /// Only of this tenant's namespace; `None`: only those without one.
    pub namespace: Option<String>,
    pub source: Option<SandboxId>,
    pub name: Option<String>,
    pub states: Vec<SnapshotState>,
}

/// Which request an idempotency key stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IdempotencyRecord {
    /// Digest of the request body.
    pub fingerprint: String,
    pub sandbox_id: SandboxId,
}

/// Outcome of claiming an idempotency key together with a create intent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Claim {
    Claimed,
    /// The key already stands for this record.
    Taken(IdempotencyRecord),
}

/// What is kept of a sandbox's agent over a restart of the server.
#[derive(Debug, Clone, PartialEq)]
pub struct AgentRecord {
    pub sandbox_id: SandboxId,
    /// Opaque to the store. Holds no secret: of a token its digest.
    pub body: serde_json::Value,
}

/// What is kept of the kind of sandboxes that a breaker is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BreakerRecord {
    /// Counts the writes; every write is conditional on it.
    pub version: u64,
    pub breaker: Breaker,
}

/// Intents, idempotency keys and history.
#[async_trait]
pub trait Store: Send + Sync + 'static {
    /// Every open intent.
    async fn open_intents(&self) -> Result<Vec<Intent>, StoreError>;

    /// Inserts a create intent and, when given, its idempotency key in one transaction. Its history line is written with its outcome.
    async fn insert_create(
        &self,
        intent: &Intent,
        key: Option<(&str, &IdempotencyRecord)>,
    ) -> Result<Claim, StoreError>;

    /// Replaces the intent of a sandbox if its generation is still `expected` (`None`: if there is no open one) and
    /// appends the event, in one transaction.
    async fn advance(
        &self,
        expected: Option<u64>,
        intent: &Intent,
        event: Option<&EventRecord>,
    ) -> Result<Advance, StoreError>;

    /// Closes the intent if its generation is still `expected` and appends the events, in one transaction.
    async fn close(
        &self,
        id: SandboxId,
        expected: u64,
        events: &[EventRecord],
    ) -> Result<Advance, StoreError>;

    /// Appends history.
    async fn append(&self, id: SandboxId, events: &[EventRecord]) -> Result<(), StoreError>;

    /// The newest `limit` history lines of a sandbox, oldest first. Survives the sandbox.
    async fn history(&self, id: SandboxId, limit: u32) -> Result<Vec<EventRecord>, StoreError>;

    /// The record behind an idempotency key, if any.
    async fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>, StoreError>;

    /// Forgets the idempotency key of a sandbox whose create was answered with an error, so that it may be tried again.
    async fn release_key(&self, id: SandboxId) -> Result<(), StoreError>;

    /// Forgets history and idempotency keys older than `before`.
    async fn prune(&self, before: Timestamp) -> Result<u64, StoreError>;

    /// Up to `limit` history lines after the sequence `after`, oldest first. Survives the sandbox.
    async fn history_after(
        &self,
        id: SandboxId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<SequencedEvent>, StoreError>;

    /// The kept part of a sandbox's history; `None` when nothing is known of such a sandbox.
    async fn history_bounds(&self, id: SandboxId) -> Result<Option<HistoryBounds>, StoreError>;

    /// Sandboxes that ended at or after `since`, newest first: all of them up to a bound of the store's, or one.
    async fn ended(&self, since: Timestamp, id: Option<SandboxId>) -> Result<Vec<EndedSandbox>, StoreError>;

    /// What is kept of every agent.
    async fn agents(&self) -> Result<Vec<AgentRecord>, StoreError>;

    /// Inserts or replaces what is kept of an agent and appends what it told, in one transaction: an event that was acknowledged is
    /// written, and one that is written is acknowledged.
    async fn save_agent(&self, record: &AgentRecord, events: &[EventRecord]) -> Result<(), StoreError>;

    /// Forgets an agent. Absent is success.
    async fn forget_agent(&self, id: SandboxId) -> Result<(), StoreError>;

    /// What is kept of the use of every sandbox that has policies.
    async fn usages(&self) -> Result<Vec<(SandboxId, Usage)>, StoreError>;

    /// Inserts or replaces what is kept of the use of a sandbox.
    async fn save_usage(&self, id: SandboxId, usage: &Usage) -> Result<(), StoreError>;

    /// Forgets the use of a sandbox. Absent is success.
    async fn forget_usage(&self, id: SandboxId) -> Result<(), StoreError>;

    /// The breaker of a kind of sandboxes; `None` when nothing is known of it.
    async fn breaker(&self, key: &str) -> Result<Option<BreakerRecord>, StoreError>;

    /// Replaces a breaker if its version is still `expected` (`None`: if there is none). [`Store::prune`] forgets what was not written since.
    async fn save_breaker(
        &self,
        key: &str,
        expected: Option<u64>,
        breaker: &Breaker,
        at: Timestamp,
    ) -> Result<Advance, StoreError>;

    /// Every pool, by name.
    async fn pools(&self) -> Result<Vec<Pool>, StoreError>;

    /// Inserts a pool; `Lost` when the name is taken.
    async fn insert_pool(&self, pool: &Pool) -> Result<Advance, StoreError>;

    /// Replaces the pool of that name; `Lost` when there is none.
    async fn replace_pool(&self, pool: &Pool) -> Result<Advance, StoreError>;

    /// Removes a pool; `Lost` when there is none.
    async fn delete_pool(&self, name: &str) -> Result<Advance, StoreError>;

    /// Inserts a snapshot.
    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), StoreError>;

    /// Replaces the snapshot if its state is still `expected`.
    async fn advance_snapshot(
        &self,
        expected: SnapshotState,
        snapshot: &SnapshotRecord,
    ) -> Result<Advance, StoreError>;

    /// Removes the snapshot if its state is still `expected`.
    async fn delete_snapshot(&self, id: SnapshotId, expected: SnapshotState) -> Result<Advance, StoreError>;

    /// One snapshot, whatever its namespace.
    async fn snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotRecord>, StoreError>;

    /// A page of the matching snapshots, newest first, ties by descending id; and how many match in all.
    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<SnapshotRecord>, u64), StoreError>;

    /// Every snapshot in the state, whatever its namespace: what a recovery looks at.
    async fn snapshots_in(&self, state: SnapshotState) -> Result<Vec<SnapshotRecord>, StoreError>;

    /// Writes everything out and closes the connections. Nothing may be asked afterwards.
    async fn shut(&self);
}
