//! Rows of requests that must not happen twice.

use std::borrow::Cow;

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{IdempotencyRecord, StoreError},
};
use sha2::{Digest, Sha256};

use super::database::{Session, values};

/// The longest key that is kept as it is: an index of PostgreSQL takes no more than a third of a page.
const LONGEST: usize = 512;

pub(super) async fn find(on: &mut Session, key: &str) -> Result<Option<IdempotencyRecord>, StoreError> {
    let row: Option<(String, String)> = on
        .row("SELECT fingerprint, sandbox_id FROM idempotency_keys WHERE key = $1", values![&*kept(key)])
        .await?;
    row.map(|(fingerprint, id)| {
        let sandbox_id = id.parse().map_err(|e| StoreError::Corrupt(format!("an idempotency key: {e}")))?;
        Ok(IdempotencyRecord { fingerprint, sandbox_id })
    })
    .transpose()
}

/// Whether the key was free. Waits for another transaction that has claimed it and not ended yet.
pub(super) async fn claim(
    on: &mut Session,
    key: &str,
    record: &IdempotencyRecord,
    at: Timestamp,
) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "INSERT INTO idempotency_keys (key, fingerprint, sandbox_id, at_ms) VALUES ($1, $2, $3, $4) \
             ON CONFLICT (key) DO NOTHING",
            values![&*kept(key), record.fingerprint.as_str(), record.sandbox_id.to_string(), at.as_millis()],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn release(on: &mut Session, id: SandboxId) -> Result<(), StoreError> {
    on.execute("DELETE FROM idempotency_keys WHERE sandbox_id = $1", values![id.to_string()]).await?;
    Ok(())
}

pub(super) async fn prune(on: &mut Session, before: Timestamp) -> Result<u64, StoreError> {
    on.execute("DELETE FROM idempotency_keys WHERE at_ms < $1", values![before.as_millis()]).await
}

fn kept(key: &str) -> Cow<'_, str> {
    if key.len() <= LONGEST {
        return Cow::Borrowed(key);
    }
    let digest = Sha256::digest(key);
    Cow::Owned(digest.iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}")))
}
