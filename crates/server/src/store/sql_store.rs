//! The one implementation of the [`Store`] port, over either engine.

use std::{fmt, path::Path, time::Duration};

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

use super::{
    agents,
    database::{Database, within},
    events, idempotency, intents, policies, pools, postgres, snapshots, sqlite,
};
use crate::config::{PostgresConfig, StoreConfig, StoreKind};

/// A server that has just been restarted or is a continent away still gets this long, however short the wait for a connection.
const LEAST_PATIENCE: Duration = Duration::from_secs(1);
/// Forgetting old rows happens in the background and may go through many of them.
const PRUNE_PATIENCE: u32 = 12;
/// Lines from which sandboxes that ended are told.
const MOST_ENDED: u32 = 20_000;
/// A key can be released between its refusal and the look at who has it, but hardly so often.
const CLAIM_ATTEMPTS: u32 = 5;

/// A store in a SQLite file or a PostgreSQL database.
#[derive(Clone)]
pub struct SqlStore {
    pub(super) database: Database,
    /// How long one call may take on a database that is reached over a network.
    pub(super) limit: Option<Duration>,
}

impl fmt::Debug for SqlStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.database {
            Database::Sqlite { .. } => "SqlStore(SQLite)",
            Database::Postgres(_) => "SqlStore(PostgreSQL)",
        })
    }
}

impl SqlStore {
    /// Opens the configured store and brings its tables up to date. A SQLite file is created when it is absent.
    ///
    /// # Errors
    /// When it cannot be opened or reached, is not a database, or was written by a newer server.
    pub async fn open(config: &StoreConfig) -> Result<Self, StoreError> {
        match config.kind {
            StoreKind::Sqlite => Self::open_file(&config.path).await,
            StoreKind::Postgresql => Self::open_postgres(&config.postgresql, postgres::SERVER).await,
        }
    }

    /// Where the configured store is, for messages.
    pub fn place(config: &StoreConfig) -> String {
        match config.kind {
            StoreKind::Sqlite => config.path.display().to_string(),
            StoreKind::Postgresql => "in PostgreSQL".into(),
        }
    }

    pub(super) async fn open_file(path: &Path) -> Result<Self, StoreError> {
        Ok(Self { database: sqlite::open(path).await?, limit: None })
    }

    pub(super) async fn open_postgres(
        config: &PostgresConfig,
        application: &str,
    ) -> Result<Self, StoreError> {
        let pool = postgres::open(config, application).await?;
        let limit = Some(config.pool_timeout.max(LEAST_PATIENCE));
        Ok(Self { database: Database::Postgres(pool), limit })
    }
}

#[async_trait]
impl Store for SqlStore {
    async fn open_intents(&self) -> Result<Vec<Intent>, StoreError> {
        within(self.limit, async { intents::all(&mut self.database.reader().await?).await }).await
    }

    async fn insert_create(
        &self,
        intent: &Intent,
        key: Option<(&str, &IdempotencyRecord)>,
    ) -> Result<Claim, StoreError> {
        within(self.limit, async {
            let Some((key, record)) = key else {
                // One statement is its own transaction, and this one is on the way of every create.
                intents::insert(&mut self.database.writer().await?, intent).await?;
                return Ok(Claim::Claimed);
            };
            for _ in 0..CLAIM_ATTEMPTS {
                let mut tx = self.database.begin().await?;
                if idempotency::claim(&mut tx, key, record, intent.accepted_at).await? {
                    intents::insert(&mut tx, intent).await?;
                    tx.commit().await?;
                    return Ok(Claim::Claimed);
                }
                if let Some(taken) = idempotency::find(&mut tx, key).await? {
                    return Ok(Claim::Taken(taken));
                }
            }
            Err(StoreError::Unavailable("an idempotency key changes too fast".into()))
        })
        .await
    }

    async fn advance(
        &self,
        expected: Option<u64>,
        intent: &Intent,
        event: Option<&EventRecord>,
    ) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let written = match expected {
                Some(generation) => intents::replace(&mut tx, generation, intent).await?,
                None => intents::insert_if_none(&mut tx, intent).await?,
            };
            if !written {
                return Ok(Advance::Lost);
            }
            if let Some(event) = event {
                events::append(&mut tx, intent.sandbox_id, std::slice::from_ref(event)).await?;
            }
            tx.commit().await?;
            Ok(Advance::Written)
        })
        .await
    }

    async fn close(
        &self,
        id: SandboxId,
        expected: u64,
        closing: &[EventRecord],
    ) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            if !intents::delete(&mut tx, id, expected).await? {
                return Ok(Advance::Lost);
            }
            events::append(&mut tx, id, closing).await?;
            tx.commit().await?;
            Ok(Advance::Written)
        })
        .await
    }

    async fn append(&self, id: SandboxId, new: &[EventRecord]) -> Result<(), StoreError> {
        if new.is_empty() {
            return Ok(());
        }
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            events::append(&mut tx, id, new).await?;
            tx.commit().await
        })
        .await
    }

    async fn history(&self, id: SandboxId, limit: u32) -> Result<Vec<EventRecord>, StoreError> {
        within(self.limit, async { events::newest(&mut self.database.reader().await?, id, limit).await })
            .await
    }

    async fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>, StoreError> {
        within(self.limit, async { idempotency::find(&mut self.database.reader().await?, key).await }).await
    }

    async fn release_key(&self, id: SandboxId) -> Result<(), StoreError> {
        within(self.limit, async { idempotency::release(&mut self.database.writer().await?, id).await }).await
    }

    async fn prune(&self, before: Timestamp) -> Result<u64, StoreError> {
        within(self.limit.map(|limit| limit * PRUNE_PATIENCE), async {
            let mut tx = self.database.begin().await?;
            let gone = events::prune(&mut tx, before).await? + idempotency::prune(&mut tx, before).await?;
            policies::prune(&mut tx, before).await?;
            tx.commit().await?;
            Ok(gone)
        })
        .await
    }

    async fn history_after(
        &self,
        id: SandboxId,
        after: u64,
        limit: u32,
    ) -> Result<Vec<SequencedEvent>, StoreError> {
        within(self.limit, async {
            events::after(&mut self.database.reader().await?, id, after, limit).await
        })
        .await
    }

    async fn history_bounds(&self, id: SandboxId) -> Result<Option<HistoryBounds>, StoreError> {
        within(self.limit, async { events::bounds(&mut self.database.reader().await?, id).await }).await
    }

    async fn ended(&self, since: Timestamp, id: Option<SandboxId>) -> Result<Vec<EndedSandbox>, StoreError> {
        within(self.limit, async {
            events::ended(&mut self.database.reader().await?, since, id, MOST_ENDED).await
        })
        .await
    }

    async fn agents(&self) -> Result<Vec<AgentRecord>, StoreError> {
        within(self.limit, async { agents::all(&mut self.database.reader().await?).await }).await
    }

    async fn save_agent(&self, record: &AgentRecord, told: &[EventRecord]) -> Result<(), StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            agents::save(&mut tx, record).await?;
            events::append(&mut tx, record.sandbox_id, told).await?;
            tx.commit().await
        })
        .await
    }

    async fn forget_agent(&self, id: SandboxId) -> Result<(), StoreError> {
        within(self.limit, async { agents::forget(&mut self.database.writer().await?, id).await }).await
    }

    async fn usages(&self) -> Result<Vec<(SandboxId, Usage)>, StoreError> {
        within(self.limit, async { policies::usages(&mut self.database.reader().await?).await }).await
    }

    async fn save_usage(&self, id: SandboxId, usage: &Usage) -> Result<(), StoreError> {
        within(self.limit, async {
            policies::save_usage(&mut self.database.writer().await?, id, usage).await
        })
        .await
    }

    async fn pools(&self) -> Result<Vec<Pool>, StoreError> {
        within(self.limit, async { pools::all(&mut self.database.reader().await?).await }).await
    }

    async fn insert_pool(&self, pool: &Pool) -> Result<Advance, StoreError> {
        within(self.limit, async {
            Ok(outcome(pools::insert(&mut self.database.writer().await?, pool).await?))
        })
        .await
    }

    async fn forget_usage(&self, id: SandboxId) -> Result<(), StoreError> {
        within(self.limit, async { policies::forget_usage(&mut self.database.writer().await?, id).await })
            .await
    }

    async fn breaker(&self, key: &str) -> Result<Option<BreakerRecord>, StoreError> {
        within(self.limit, async { policies::breaker(&mut self.database.reader().await?, key).await }).await
    }

    async fn save_breaker(
        &self,
        key: &str,
        expected: Option<u64>,
        breaker: &Breaker,
        at: Timestamp,
    ) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let mut on = self.database.writer().await?;
            Ok(outcome(policies::save_breaker(&mut on, key, expected, breaker, at).await?))
        })
        .await
    }

    async fn replace_pool(&self, pool: &Pool) -> Result<Advance, StoreError> {
        within(self.limit, async {
            Ok(outcome(pools::replace(&mut self.database.writer().await?, pool).await?))
        })
        .await
    }

    async fn delete_pool(&self, name: &str) -> Result<Advance, StoreError> {
        within(self.limit, async {
            Ok(outcome(pools::delete(&mut self.database.writer().await?, name).await?))
        })
        .await
    }

    async fn insert_snapshot(&self, snapshot: &SnapshotRecord) -> Result<(), StoreError> {
        within(self.limit, async { snapshots::insert(&mut self.database.writer().await?, snapshot).await })
            .await
    }

    async fn advance_snapshot(
        &self,
        expected: SnapshotState,
        snapshot: &SnapshotRecord,
    ) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let written = snapshots::replace(&mut self.database.writer().await?, expected, snapshot).await?;
            Ok(outcome(written))
        })
        .await
    }

    async fn delete_snapshot(&self, id: SnapshotId, expected: SnapshotState) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let written = snapshots::delete(&mut self.database.writer().await?, id, expected).await?;
            Ok(outcome(written))
        })
        .await
    }

    async fn snapshot(&self, id: SnapshotId) -> Result<Option<SnapshotRecord>, StoreError> {
        within(self.limit, async { snapshots::find(&mut self.database.reader().await?, id).await }).await
    }

    async fn snapshots(
        &self,
        filter: &SnapshotFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<SnapshotRecord>, u64), StoreError> {
        within(self.limit, async {
            let mut on = self.database.reader().await?;
            let total = snapshots::count(&mut on, filter).await?;
            Ok((snapshots::page(&mut on, filter, offset, limit).await?, total))
        })
        .await
    }

    async fn snapshots_in(&self, state: SnapshotState) -> Result<Vec<SnapshotRecord>, StoreError> {
        within(self.limit, async { snapshots::in_state(&mut self.database.reader().await?, state).await })
            .await
    }

    async fn shut(&self) {
        self.database.close().await;
    }
}

pub(super) fn outcome(written: bool) -> Advance {
    if written { Advance::Written } else { Advance::Lost }
}
