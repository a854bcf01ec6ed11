//! Rows of use and of circuit breakers.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    breaker::Breaker,
    policy::Usage,
    ports::store::{BreakerRecord, StoreError},
};
use serde::{Serialize, de::DeserializeOwned};

use super::database::{Session, values};

fn unreadable(what: impl std::fmt::Display) -> StoreError {
    StoreError::Corrupt(format!("what is kept for policies is unreadable: {what}"))
}

fn read<T: DeserializeOwned>(body: &str) -> Result<T, StoreError> {
    serde_json::from_str(body).map_err(unreadable)
}

fn written<T: Serialize>(value: &T) -> Result<String, StoreError> {
    serde_json::to_string(value).map_err(unreadable)
}

pub(super) async fn usages(on: &mut Session) -> Result<Vec<(SandboxId, Usage)>, StoreError> {
    let rows: Vec<(String, String)> = on.rows("SELECT sandbox_id, body FROM usages", values![]).await?;
    let of = |(id, body): &(String, String)| {
        Ok((id.parse().map_err(|_| unreadable("a sandbox's id"))?, read(body)?))
    };
    rows.iter().map(of).collect()
}

pub(super) async fn save_usage(on: &mut Session, id: SandboxId, usage: &Usage) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO usages (sandbox_id, body) VALUES ($1, $2) \
         ON CONFLICT (sandbox_id) DO UPDATE SET body = excluded.body",
        values![id.to_string(), written(usage)?],
    )
    .await?;
    Ok(())
}

pub(super) async fn forget_usage(on: &mut Session, id: SandboxId) -> Result<(), StoreError> {
    on.execute("DELETE FROM usages WHERE sandbox_id = $1", values![id.to_string()]).await?;
    Ok(())
}

pub(super) async fn breaker(on: &mut Session, key: &str) -> Result<Option<BreakerRecord>, StoreError> {
    let row: Option<(i64, String)> =
        on.row("SELECT version, body FROM breakers WHERE key = $1", values![key]).await?;
    let Some((version, body)) = row else { return Ok(None) };
    Ok(Some(BreakerRecord { version: u64::try_from(version).map_err(unreadable)?, breaker: read(&body)? }))
}

/// Returns whether the row was still of the version that was expected.
pub(super) async fn save_breaker(
    on: &mut Session,
    key: &str,
    expected: Option<u64>,
    breaker: &Breaker,
    at: Timestamp,
) -> Result<bool, StoreError> {
    let (body, at) = (written(breaker)?, at.as_millis());
    let changed = match expected {
        None => {
            on.execute(
                "INSERT INTO breakers (key, version, at_ms, body) VALUES ($1, 1, $2, $3) \
                 ON CONFLICT (key) DO NOTHING",
                values![key, at, body],
            )
            .await?
        }
        Some(version) => {
            let version = i64::try_from(version).map_err(unreadable)?;
            on.execute(
                "UPDATE breakers SET version = version + 1, at_ms = $2, body = $3 \
                 WHERE key = $1 AND version = $4",
                values![key, at, body, version],
            )
            .await?
        }
    };
    Ok(changed == 1)
}

/// Forgets breakers that nobody has touched since.
pub(super) async fn prune(on: &mut Session, before: Timestamp) -> Result<u64, StoreError> {
    on.execute("DELETE FROM breakers WHERE at_ms < $1", values![before.as_millis()]).await
}
