//! Writing a create down, and knowing whether it is.

use sandglass_sandbox::{
    lifecycle::intent::Intent,
    ports::{
        StoreError,
        store::{Claim, IdempotencyRecord},
    },
};
use tokio::sync::MutexGuard;
use tracing::warn;

use super::{
    Engine,
    commit::{EngineError, NewSandbox},
};

/// Why a create is not known to be written down.
pub(super) enum Unwritten {
    Surely(EngineError),
    /// It may turn up at the next start, and then needs what was kept for it.
    Perhaps(StoreError),
}

impl From<Unwritten> for EngineError {
    fn from(unwritten: Unwritten) -> Self {
        match unwritten {
            Unwritten::Surely(error) => error,
            Unwritten::Perhaps(error) => error.into(),
        }
    }
}

impl Engine {
    /// Writes a create down. With it comes the gate of its snapshot, which must not go before the create can be seen.
    pub(super) async fn write_down(
        &self,
        new: &NewSandbox,
        intent: &Intent,
    ) -> Result<(Claim, Option<MutexGuard<'_, ()>>), Unwritten> {
        let unchanged = self.restorable(new.spec.snapshot).await.map_err(Unwritten::Surely)?;
        let record = |fingerprint: &String| IdempotencyRecord {
            fingerprint: fingerprint.clone(),
            sandbox_id: intent.sandbox_id,
        };
        let key = new.key.as_ref().map(|(key, fingerprint)| (key.as_str(), record(fingerprint)));
        let key = key.as_ref().map(|(key, record)| (*key, record));
        let error = match self.store.insert_create(intent, key).await {
            Ok(claim) => return Ok((claim, unchanged)),
            Err(error) => error,
        };
        // An answer that was lost says nothing of what was done.
        match self.store.open_intents().await {
            Ok(open) if open.iter().any(|one| one.sandbox_id == intent.sandbox_id) => {
                warn!(sandbox = %intent.sandbox_id, %error, "a create is written down, whatever the store answered");
                Ok((Claim::Claimed, unchanged))
            }
            Ok(_) => Err(Unwritten::Surely(error.into())),
            Err(_) => Err(Unwritten::Perhaps(error)),
        }
    }
}
