//! Sandboxes that were created to run whenever somebody wants them.

use std::sync::Arc;

use sandglass_api::lifecycle::WAKE_ON_ACCESS_EXTENSION;
use sandglass_sandbox::lifecycle::{request::Refused, state::State};

use super::{Engine, commit::EngineError, index::Entry};

impl Entry {
    /// Whether a request is reason enough to resume it.
    pub fn wakes(&self) -> bool {
        self.spec().is_some_and(|spec| {
            spec.extensions.get(WAKE_ON_ACCESS_EXTENSION).is_some_and(|wakes| wakes == "true")
        })
    }
}

impl Engine {
    /// Resumes a sandbox that is paused, or that is being paused as soon as it is. One that is not is left as it is.
    ///
    /// # Errors
    /// When it is gone or cannot be resumed.
    pub async fn wake(self: &Arc<Self>, id: &str) -> Result<(), EngineError> {
        let entry = self.find(id)?;
        let pausing = |entry: &Entry| entry.status().is_some_and(|status| status.state == State::Pausing);
        self.index.wait_for(entry.id, |entry| entry.is_none_or(|entry| !pausing(entry)).then_some(())).await;
        match self.resume(id).await {
            // Somebody else was faster, or it has ended; the next look tells which.
            Err(EngineError::Refused(Refused::NotPaused(_))) => Ok(()),
            woken => woken,
        }
    }
}
