//! A longer life for a sandbox that is in use and was created with the extension for it.

use std::{sync::Arc, time::Duration};

use sandglass_api::lifecycle::RENEW_ON_ACCESS_EXTENSION;
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{request::Request, state::State},
};

use super::{Engine, commit::EngineError, history::RENEWED, index::Entry};

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Extended {
    /// It now lives until then.
    Until(Timestamp),
    /// It lives at least that long as it is.
    Enough,
    /// It is gone, does not run, never expires, or was created without the extension.
    Ineligible,
}

/// By how much use extends the life of this sandbox; `None` when it does not.
pub fn extension(entry: &Entry) -> Option<Duration> {
    let seconds = entry.spec()?.extensions.get(RENEW_ON_ACCESS_EXTENSION)?.trim().parse().ok()?;
    let expires = entry.facts()?.expires_at.is_some();
    (expires && entry.status()?.state == State::Running).then(|| Duration::from_secs(seconds))
}

impl Engine {
    /// By how much use extends the life of this sandbox now; `None` when it does not.
    pub fn extension(&self, id: SandboxId) -> Option<Duration> {
        extension(&self.index.get(id)?)
    }

    /// Moves the expiry to now plus the extension, never to an earlier instant.
    ///
    /// # Errors
    /// When the runtime or the store fails.
    pub async fn extend(self: &Arc<Self>, id: SandboxId) -> Result<Extended, EngineError> {
        let Some(entry) = self.index.get(id) else { return Ok(Extended::Ineligible) };
        let Some(by) = extension(&entry) else { return Ok(Extended::Ineligible) };
        let Some(until) = self.clock.now().checked_add(by) else { return Ok(Extended::Enough) };
        if entry.facts().and_then(|facts| facts.expires_at).is_some_and(|at| at >= until) {
            return Ok(Extended::Enough);
        }
        let changed = self.change_facts(id, Request::Renew, |facts| {
            // Under the lock: somebody may have renewed it for longer in the meantime.
            let current = facts.expires_at.ok_or(EngineError::ManualCleanup)?;
            facts.expires_at = Some(current.max(until));
            Ok(())
        });
        match changed.await {
            Ok(()) => {}
            Err(EngineError::NotFound(_) | EngineError::ManualCleanup) => return Ok(Extended::Ineligible),
            Err(error) => return Err(error),
        }
        // The renewal itself lies with the runtime and holds, whether this line is written or not.
        self.note(id, RENEWED, &format!("{until}, because it is in use")).await;
        Ok(Extended::Until(until))
    }
}
