//! Rows of operations in flight.

use sandglass_sandbox::{SandboxId, lifecycle::intent::Intent, ports::store::StoreError};
use sqlx::{SqliteConnection, SqlitePool};

use super::sqlite::unavailable;

pub(super) async fn all(pool: &SqlitePool) -> Result<Vec<Intent>, StoreError> {
    let rows: Vec<(String,)> =
        sqlx::query_as("SELECT body FROM intents").fetch_all(pool).await.map_err(unavailable)?;
    rows.iter()
        .map(|(body,)| {
            serde_json::from_str(body)
                .map_err(|e| StoreError::Corrupt(format!("an intent is unreadable: {e}")))
        })
        .collect()
}

fn body(intent: &Intent) -> String {
    serde_json::to_string(intent).expect("an intent holds only maps with text keys")
}

fn bigint(generation: u64) -> i64 {
    i64::try_from(generation).unwrap_or(i64::MAX)
}

pub(super) async fn insert(tx: &mut SqliteConnection, intent: &Intent) -> Result<(), StoreError> {
    sqlx::query("INSERT INTO intents (sandbox_id, generation, body) VALUES ($1, $2, $3)")
        .bind(intent.sandbox_id.to_string())
        .bind(bigint(intent.generation))
        .bind(body(intent))
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(())
}

pub(super) async fn insert_if_none(tx: &mut SqliteConnection, intent: &Intent) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "INSERT INTO intents (sandbox_id, generation, body) VALUES ($1, $2, $3) ON CONFLICT (sandbox_id) DO NOTHING",
    )
    .bind(intent.sandbox_id.to_string())
    .bind(bigint(intent.generation))
    .bind(body(intent))
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn replace(
    tx: &mut SqliteConnection,
    expected: u64,
    intent: &Intent,
) -> Result<bool, StoreError> {
    let done = sqlx::query(
        "UPDATE intents SET generation = $1, body = $2 WHERE sandbox_id = $3 AND generation = $4",
    )
    .bind(bigint(intent.generation))
    .bind(body(intent))
    .bind(intent.sandbox_id.to_string())
    .bind(bigint(expected))
    .execute(tx)
    .await
    .map_err(unavailable)?;
    Ok(done.rows_affected() == 1)
}

pub(super) async fn delete(
    tx: &mut SqliteConnection,
    id: SandboxId,
    expected: u64,
) -> Result<bool, StoreError> {
    let done = sqlx::query("DELETE FROM intents WHERE sandbox_id = $1 AND generation = $2")
        .bind(id.to_string())
        .bind(bigint(expected))
        .execute(tx)
        .await
        .map_err(unavailable)?;
    Ok(done.rows_affected() == 1)
}
