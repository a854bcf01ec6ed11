//! Opening the database and the one implementation of the [`Store`] port.

use std::{path::Path, time::Duration};

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::intent::Intent,
    ports::store::{Advance, Claim, EventRecord, IdempotencyRecord, Store, StoreError},
};
use sqlx::{
    SqlSafeStr, SqlitePool,
    migrate::{Migration, MigrationType, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::{events, idempotency, intents};

/// Write transactions take the lock at once: one that upgrades later fails without waiting.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// A store in one SQLite file.
#[derive(Debug, Clone)]
pub struct SqliteStore {
    writer: SqlitePool,
    readers: SqlitePool,
}

impl SqliteStore {
    /// Opens or creates the file and brings its tables up to date.
    ///
    /// # Errors
    /// When the file cannot be opened, is not a database, or was written by a newer server.
    pub async fn open(path: &Path) -> Result<Self, StoreError> {
        // It holds the sandboxes' tokens. The files beside it inherit the mode.
        private_file(path).map_err(|e| StoreError::Unavailable(format!("{}: {e}", path.display())))?;
        // WAL with synchronous=NORMAL: safe against a killed process, no fsync on the create path.
        let options = SqliteConnectOptions::new()
            .filename(path)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Normal)
            .busy_timeout(Duration::from_secs(5))
            .foreign_keys(true);
        let writer = SqlitePoolOptions::new()
            .max_connections(1)
            .connect_with(options.clone())
            .await
            .map_err(unavailable)?;
        let migrations = vec![Migration::new(
            1,
            "spine".into(),
            MigrationType::Simple,
            include_str!("migrations/sqlite/0001_spine.sql").into_sql_str(),
            false,
        )];
        Migrator::with_migrations(migrations)
            .run(&writer)
            .await
            .map_err(|e| StoreError::Unavailable(format!("cannot prepare the tables: {e}")))?;
        if let Err(error) = reserve(&writer).await {
            tracing::warn!(%error, "no space could be reserved for the time when the disk is full");
        }
        let readers = SqlitePoolOptions::new()
            .max_connections(2)
            .min_connections(0)
            .connect_lazy_with(options.read_only(true).create_if_missing(false));
        Ok(Self { writer, readers })
    }

    /// Writes everything out and closes the file.
    pub async fn shut(&self) {
        self.readers.close().await;
        self.writer.close().await;
    }
}

/// Leaves free pages in the database and a log of some length beside it, so that removals can be recorded on a full disk:
/// it is they that make room again.
async fn reserve(writer: &SqlitePool) -> Result<(), sqlx::Error> {
    for statement in [
        "CREATE TABLE reserve (filler BLOB)",
        "INSERT INTO reserve VALUES (zeroblob(2097152))",
        "DROP TABLE reserve",
        "PRAGMA wal_checkpoint(PASSIVE)",
    ] {
        sqlx::query(statement).execute(writer).await?;
    }
    Ok(())
}

fn private_file(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))
}

pub(super) fn unavailable(e: sqlx::Error) -> StoreError {
    StoreError::Unavailable(e.to_string())
}

#[async_trait]
impl Store for SqliteStore {
    async fn open_intents(&self) -> Result<Vec<Intent>, StoreError> {
        intents::all(&self.readers).await
    }

    async fn insert_create(
        &self,
        intent: &Intent,
        key: Option<(&str, &IdempotencyRecord)>,
    ) -> Result<Claim, StoreError> {
        if key.is_none() {
            // One statement is its own transaction, and this one is on the way of every create.
            let mut writer = self.writer.acquire().await.map_err(unavailable)?;
            intents::insert(&mut writer, intent).await?;
            return Ok(Claim::Claimed);
        }
        let mut tx = self.writer.begin_with(BEGIN).await.map_err(unavailable)?;
        if let Some((key, record)) = key {
            if let Some(taken) = idempotency::find(&mut *tx, key).await? {
                return Ok(Claim::Taken(taken));
            }
            idempotency::insert(&mut tx, key, record, intent.accepted_at).await?;
        }
        intents::insert(&mut tx, intent).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Claim::Claimed)
    }

    async fn advance(
        &self,
        expected: Option<u64>,
        intent: &Intent,
        event: Option<&EventRecord>,
    ) -> Result<Advance, StoreError> {
        let mut tx = self.writer.begin_with(BEGIN).await.map_err(unavailable)?;
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
        tx.commit().await.map_err(unavailable)?;
        Ok(Advance::Written)
    }

    async fn close(
        &self,
        id: SandboxId,
        expected: u64,
        closing: &[EventRecord],
    ) -> Result<Advance, StoreError> {
        let mut tx = self.writer.begin_with(BEGIN).await.map_err(unavailable)?;
        if !intents::delete(&mut tx, id, expected).await? {
            return Ok(Advance::Lost);
        }
        events::append(&mut tx, id, closing).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(Advance::Written)
    }

    async fn append(&self, id: SandboxId, new: &[EventRecord]) -> Result<(), StoreError> {
        if new.is_empty() {
            return Ok(());
        }
        let mut tx = self.writer.begin_with(BEGIN).await.map_err(unavailable)?;
        events::append(&mut tx, id, new).await?;
        tx.commit().await.map_err(unavailable)
    }

    async fn history(&self, id: SandboxId, limit: u32) -> Result<Vec<EventRecord>, StoreError> {
        events::newest(&self.readers, id, limit).await
    }

    async fn idempotency(&self, key: &str) -> Result<Option<IdempotencyRecord>, StoreError> {
        idempotency::find(&self.readers, key).await
    }

    async fn release_key(&self, id: SandboxId) -> Result<(), StoreError> {
        idempotency::release(&self.writer, id).await
    }

    async fn prune(&self, before: Timestamp) -> Result<u64, StoreError> {
        let mut tx = self.writer.begin_with(BEGIN).await.map_err(unavailable)?;
        let gone = events::prune(&mut tx, before).await? + idempotency::prune(&mut tx, before).await?;
        tx.commit().await.map_err(unavailable)?;
        Ok(gone)
    }

    async fn history_after(
        &self,
        _id: SandboxId,
        _after: u64,
        _limit: u32,
    ) -> Result<Vec<sandglass_sandbox::ports::store::SequencedEvent>, StoreError> {
        Err(StoreError::Unavailable("history pages".into()))
    }

    async fn history_bounds(
        &self,
        _id: SandboxId,
    ) -> Result<Option<sandglass_sandbox::ports::store::HistoryBounds>, StoreError> {
        Ok(None)
    }

    async fn insert_snapshot(
        &self,
        _snapshot: &sandglass_sandbox::snapshot::SnapshotRecord,
    ) -> Result<(), StoreError> {
        Err(StoreError::Unavailable("snapshots".into()))
    }

    async fn advance_snapshot(
        &self,
        _expected: sandglass_sandbox::snapshot::SnapshotState,
        _snapshot: &sandglass_sandbox::snapshot::SnapshotRecord,
    ) -> Result<Advance, StoreError> {
        Ok(Advance::Lost)
    }

    async fn delete_snapshot(
        &self,
        _id: sandglass_sandbox::SnapshotId,
        _expected: sandglass_sandbox::snapshot::SnapshotState,
    ) -> Result<Advance, StoreError> {
        Ok(Advance::Lost)
    }

    async fn snapshot(
        &self,
        _id: sandglass_sandbox::SnapshotId,
    ) -> Result<Option<sandglass_sandbox::snapshot::SnapshotRecord>, StoreError> {
        Ok(None)
    }

    async fn snapshots(
        &self,
        _filter: &sandglass_sandbox::ports::store::SnapshotFilter,
        _offset: u64,
        _limit: u64,
    ) -> Result<(Vec<sandglass_sandbox::snapshot::SnapshotRecord>, u64), StoreError> {
        Ok((Vec::new(), 0))
    }

    async fn snapshots_in(
        &self,
        _state: sandglass_sandbox::snapshot::SnapshotState,
    ) -> Result<Vec<sandglass_sandbox::snapshot::SnapshotRecord>, StoreError> {
        Ok(Vec::new())
    }

    async fn shut(&self) {
        Self::shut(self).await;
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
