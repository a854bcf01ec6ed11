//! Rows of requests that must not happen twice.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{IdempotencyRecord, StoreError},
};
use sqlx::{Executor, Sqlite, SqliteConnection, SqlitePool};

use super::sqlite::unavailable;

pub(super) async fn find<'e>(
    on: impl Executor<'e, Database = Sqlite>,
    key: &str,
) -> Result<Option<IdempotencyRecord>, StoreError> {
    let row: Option<(String, String)> =
        sqlx::query_as("SELECT fingerprint, sandbox_id FROM idempotency_keys WHERE key = $1")
            .bind(key.to_owned())
            .fetch_optional(on)
            .await
            .map_err(unavailable)?;
    row.map(|(fingerprint, id)| {
        let sandbox_id = id.parse().map_err(|e| StoreError::Corrupt(format!("an idempotency key: {e}")))?;
        Ok(IdempotencyRecord { fingerprint, sandbox_id })
    })
    .transpose()
}

pub(super) async fn insert(
    tx: &mut SqliteConnection,
    key: &str,
    record: &IdempotencyRecord,
    at: Timestamp,
) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO idempotency_keys (key, fingerprint, sandbox_id, at_ms) VALUES ($1, $2, $3, $4)")
        .bind(key.to_owned())
        .bind(&record.fingerprint)
        .bind(record.sandbox_id.to_string())
        .bind(at.as_millis())
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(())
}

pub(super) async fn release(on: &SqlitePool, id: SandboxId) -> Result<(), StoreError> {
    sqlx::query("DELETE FROM idempotency_keys WHERE sandbox_id = $1")
        .bind(id.to_string())
        .execute(on)
        .await
        .map_err(unavailable)?;
    Ok(())
}

pub(super) async fn prune(tx: &mut SqliteConnection, before: Timestamp) -> Result<u64, StoreError> {
    let done = sqlx::query("DELETE FROM idempotency_keys WHERE at_ms < $1")
        .bind(before.as_millis())
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected())
}
