//! Rows of operations in flight.

use sandglass_sandbox::{SandboxId, lifecycle::intent::Intent, ports::store::StoreError};

use super::database::{Session, values};

pub(super) async fn all(on: &mut Session) -> Result<Vec<Intent>, StoreError> {
    let rows: Vec<(String,)> = on.rows("SELECT body FROM intents", values![]).await?;
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

pub(super) async fn insert(on: &mut Session, intent: &Intent) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO intents (sandbox_id, generation, body) VALUES ($1, $2, $3)",
        values![intent.sandbox_id.to_string(), intent.generation, body(intent)],
    )
    .await?;
    Ok(())
}

pub(super) async fn insert_if_none(on: &mut Session, intent: &Intent) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "INSERT INTO intents (sandbox_id, generation, body) VALUES ($1, $2, $3) \
             ON CONFLICT (sandbox_id) DO NOTHING",
            values![intent.sandbox_id.to_string(), intent.generation, body(intent)],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn replace(on: &mut Session, expected: u64, intent: &Intent) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "UPDATE intents SET generation = $1, body = $2 WHERE sandbox_id = $3 AND generation = $4",
            values![intent.generation, body(intent), intent.sandbox_id.to_string(), expected],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn delete(on: &mut Session, id: SandboxId, expected: u64) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "DELETE FROM intents WHERE sandbox_id = $1 AND generation = $2",
            values![id.to_string(), expected],
        )
        .await?;
    Ok(written == 1)
}
