//! Rows of history.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{EventRecord, StoreError},
};
use sqlx::{SqliteConnection, SqlitePool};

use super::sqlite::unavailable;

pub(super) async fn append(
    tx: &mut SqliteConnection,
    id: SandboxId,
    events: &[EventRecord],
) -> Result<(), StoreError> {
    for event in events {
        sqlx::query("INSERT INTO events (sandbox_id, at_ms, kind, message) VALUES ($1, $2, $3, $4)")
            .bind(id.to_string())
            .bind(event.at.as_millis())
            .bind(&event.kind)
            .bind(&event.message)
            .execute(&mut *tx)
            .await
            .map_err(unavailable)?;
    }
    Ok(())
}

pub(super) async fn newest(
    pool: &SqlitePool,
    id: SandboxId,
    limit: u32,
) -> Result<Vec<EventRecord>, StoreError> {
    let mut rows: Vec<(i64, String, String)> = sqlx::query_as(
        "SELECT at_ms, kind, message FROM events WHERE sandbox_id = $1 ORDER BY seq DESC LIMIT $2",
    )
    .bind(id.to_string())
    .bind(i64::from(limit))
    .fetch_all(pool)
    .await
    .map_err(unavailable)?;
    rows.reverse();
    Ok(rows
        .into_iter()
        .map(|(at, kind, message)| EventRecord { at: Timestamp::clamped(at), kind, message })
        .collect())
}

pub(super) async fn prune(tx: &mut SqliteConnection, before: Timestamp) -> Result<u64, StoreError> {
    let done = sqlx::query("DELETE FROM events WHERE at_ms < $1")
        .bind(before.as_millis())
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected())
}
