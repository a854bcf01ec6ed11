//! Rows of pools of warm boxes.

use sandglass_sandbox::{pool::Pool, ports::store::StoreError};

use super::database::{Session, values};

pub(super) async fn all(on: &mut Session) -> Result<Vec<Pool>, StoreError> {
    let rows: Vec<(String,)> = on.rows("SELECT body FROM pools ORDER BY name", values![]).await?;
    rows.iter()
        .map(|(body,)| {
            serde_json::from_str(body).map_err(|e| StoreError::Corrupt(format!("a pool is unreadable: {e}")))
        })
        .collect()
}

fn body(pool: &Pool) -> String {
    serde_json::to_string(pool).expect("a pool holds only maps with text keys")
}

pub(super) async fn insert(on: &mut Session, pool: &Pool) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "INSERT INTO pools (name, body) VALUES ($1, $2) ON CONFLICT (name) DO NOTHING",
            values![pool.name.clone(), body(pool)],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn replace(on: &mut Session, pool: &Pool) -> Result<bool, StoreError> {
    let written = on
        .execute("UPDATE pools SET body = $1 WHERE name = $2", values![body(pool), pool.name.clone()])
        .await?;
    Ok(written == 1)
}

pub(super) async fn delete(on: &mut Session, name: &str) -> Result<bool, StoreError> {
    let written = on.execute("DELETE FROM pools WHERE name = $1", values![name.to_owned()]).await?;
    Ok(written == 1)
}
