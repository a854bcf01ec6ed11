//! A store that counts its errors and is otherwise the one inside.

use std::sync::Arc;

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    breaker::Breaker,
    lifecycle::intent::Intent,
    policy::Usage,
    pool::Pool,
    ports::store::{
        Advance, AgentRecord, BreakerRecord, Claim, EndedSandbox, EventRecord, HistoryBounds,
        IdempotencyRecord, SequencedEvent, SnapshotFilter, Store, StoreError,
    },
    snapshot::{SnapshotRecord, SnapshotState},
};

use super::metrics::Metrics;

/// See the module documentation.
pub struct CountedStore {
    inner: Arc<dyn Store>,
    metrics: Arc<Metrics>,
}

impl std::fmt::Debug for CountedStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CountedStore").finish_non_exhaustive()
    }
}

type Answer<T> = Result<T, StoreError>;

impl CountedStore {
    /// Counts the errors of `inner`.
    pub fn new(inner: Arc<dyn Store>, metrics: Arc<Metrics>) -> Self {
        Self { inner, metrics }
    }

    fn counted<T>(&self, answer: Answer<T>) -> Answer<T> {
        answer.inspect_err(|error| self.metrics.count_store_error(error))
    }
}

#[async_trait]
impl Store for CountedStore {
    async fn open_intents(&self) -> Answer<Vec<Intent>> {
        self.counted(self.inner.open_intents().await)
    }

    async fn insert_create(&self, intent: &Intent, key: Option<(&str, &IdempotencyRecord)>) -> Answer<Claim> {
        self.counted(self.inner.insert_create(intent, key).await)
    }

    async fn advance(
        &self,
        expected: Option<u64>,
        intent: &Intent,
        event: Option<&EventRecord>,
    ) -> Answer<Advance> {
        self.counted(self.inner.advance(expected, intent, event).await)
    }

    async fn close(&self, id: SandboxId, expected: u64, events: &[EventRecord]) -> Answer<Advance> {
        self.counted(self.inner.close(id, expected, events).await)
    }

    async fn append(&self, id: SandboxId, events: &[EventRecord]) -> Answer<()> {
        self.counted(self.inner.append(id, events).await)
    }

    async fn history(&self, id: SandboxId, limit: u32) -> Answer<Vec<EventRecord>> {
        self.counted(self.inner.history(id, limit).await)
    }

    async fn idempotency(&self, key: &str) -> Answer<Option<IdempotencyRecord>> {
        self.counted(self.inner.idempotency(key).await)
    }

    async fn release_key(&self, id: SandboxId) -> Answer<()> {
        self.counted(self.inner.release_key(id).await)
    }

    async fn prune(&self, before: Timestamp) -> Answer<u64> {
        self.counted(self.inner.prune(before).await)
    }

    async fn history_after(&self, id: SandboxId, after: u64, limit: u32) -> Answer<Vec<SequencedEvent>> {
        self.counted(self.inner.history_after(id, after, limit).await)
    }

    async fn history_bounds(&self, id: SandboxId) -> Answer<Option<HistoryBounds>> {
        self.counted(self.inner.history_bounds(id).await)
    }

    async fn ended(&self, since: Timestamp, id: Option<SandboxId>) -> Answer<Vec<EndedSandbox>> {
        self.counted(self.inner.ended(since, id).await)
    }

    async fn agents(&self) -> Answer<Vec<AgentRecord>> {
        self.counted(self.inner.agents().await)
    }

    async fn save_agent(&self, record: &AgentRecord, events: &[EventRecord]) -> Answer<()> {
        self.counted(self.inner.save_agent(record, events).await)
    }

    async fn forget_agent(&self, id: SandboxId) -> Answer<()> {
        self.counted(self.inner.forget_agent(id).await)
    }

    async fn usages(&self) -> Answer<Vec<(SandboxId, Usage)>> {
        self.counted(self.inner.usages().await)
    }

    async fn save_usage(&self, id: SandboxId, usage: &Usage) -> Answer<()> {
        self.counted(self.inner.save_usage(id, usage).await)
    }

    async fn forget_usage(&self, id: SandboxId) -> Answer<()> {
        self.counted(self.inner.forget_usage(id).await)
    }

    async fn breaker(&self, key: &str) -> Answer<Option<BreakerRecord>> {
        self.counted(self.inner.breaker(key).await)
    }

    async fn save_breaker(
        &self,
        key: &str,
        expected: Option<u64>,
        breaker: &Breaker,
        at: Timestamp,
    ) -> Answer<Advance> {
        self.counted(self.inner.save_breaker(key, expected, breaker, at).await)
    }

    async fn pools(&self) -> Answer<Vec<Pool>> {
        self.counted(self.inner.pools().await)
    }

    async fn insert_pool(&self, pool: &Pool) -> Answer<Advance> {
        self.counted(self.inner.insert_pool(pool).await)
    }

    async fn replace_pool(&self, pool: &Pool) -> Answer<Advance> {
        self.counted(self.inner.replace_pool(pool).await)
    }

    async fn delete_pool(&self, name: &str) -> Answer<Advance> {
        self.counted(self.inner.delete_pool(name).await)
    }

    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Answer<()> {
        self.counted(self.inner.insert_snapshot(snapshot).await)
    }

    async fn advance_snapshot(&self, expected: SnapshotState, snapshot: &SnapshotRecord) -> Answer<Advance> {
        self.counted(self.inner.advance_snapshot(expected, snapshot).await)
    }

    async fn delete_snapshot(&self, id: SnapshotId, expected: SnapshotState) -> Answer<Advance> {
        self.counted(self.inner.delete_snapshot(id, expected).await)
    }

    async fn snapshot(&self, id: SnapshotId) -> Answer<Option<SnapshotRecord>> {
        self.counted(self.inner.snapshot(id).await)
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        offset: u64,
        limit: u64,
    ) -> Answer<(Vec<SnapshotRecord>, u64)> {
        self.counted(self.inner.snapshots(filter, offset, limit).await)
    }

    async fn snapshots_in(&self, state: SnapshotState) -> Answer<Vec<SnapshotRecord>> {
        self.counted(self.inner.snapshots_in(state).await)
    }

    async fn shut(&self) {
        self.inner.shut().await;
    }
}
