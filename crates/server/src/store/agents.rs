//! Rows of what is kept of agents.

use sandglass_sandbox::{
    SandboxId,
    ports::store::{AgentRecord, StoreError},
};

use super::database::{Session, values};

pub(super) async fn all(on: &mut Session) -> Result<Vec<AgentRecord>, StoreError> {
    let rows: Vec<(String, String)> = on.rows("SELECT sandbox_id, body FROM agents", values![]).await?;
    rows.iter()
        .map(|(id, body)| {
            let unreadable =
                |what: &str| StoreError::Corrupt(format!("what is kept of an agent is unreadable: {what}"));
            Ok(AgentRecord {
                sandbox_id: id.parse().map_err(|_| unreadable("its sandbox"))?,
                body: serde_json::from_str(body).map_err(|e| unreadable(&e.to_string()))?,
            })
        })
        .collect()
}

pub(super) async fn save(on: &mut Session, record: &AgentRecord) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO agents (sandbox_id, body) VALUES ($1, $2) \
         ON CONFLICT (sandbox_id) DO UPDATE SET body = excluded.body",
        values![record.sandbox_id.to_string(), record.body.to_string()],
    )
    .await?;
    Ok(())
}

pub(super) async fn forget(on: &mut Session, id: SandboxId) -> Result<(), StoreError> {
    on.execute("DELETE FROM agents WHERE sandbox_id = $1", values![id.to_string()]).await?;
    Ok(())
}
