//! How sandboxes end in their history: the one place of the engine that keeps how they looked, and the last line.
//!
//! Owns both kinds of lines. Does not own the decision that a sandbox is to end, nor its box: intents, drivers and the runtime do.
//!
//! Invariant: whatever way a sandbox goes, how it looked is in its history before its last line, and before the index forgets it: whoever
//! reads on always finds whose it was.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{
        boot::{Failure, Reason},
        intent::RemoveReason,
    },
    ports::store::{EventRecord, SequencedEvent, StoreError},
};
use serde::Deserialize;
use tracing::{info, warn};

use super::{
    Engine,
    history::{RECORD, REMOVED, RENEWED},
    index::Entry,
    provision::{GIVEN_UP, told},
};

/// Lines of a history that are read at a time.
const PAGE: u32 = 1000;

impl Engine {
    /// Registers who describes sandboxes for the time when they are gone. Before [`Engine::recover`]; the first call counts.
    pub fn describe_with(&self, describe: impl Fn(&Entry) -> Option<String> + Send + Sync + 'static) {
        let _ = self.describe_hook.set(Box::new(describe));
    }

    /// How a sandbox looks, as a line that is never shown; none when nothing is known of it but that it is to go.
    pub(super) fn looks(&self, entry: &Entry) -> Option<EventRecord> {
        entry.spec()?;
        let described = (self.describe_hook.get()?)(entry)?;
        Some(self.event(RECORD, &described))
    }

    /// Keeps how a sandbox looks, before somebody makes it go. The latest of these lines counts, but that of a failure.
    ///
    /// # Errors
    /// When the store cannot be written: then it must not go yet.
    pub(super) async fn keep_looks(&self, id: SandboxId) -> Result<(), StoreError> {
        match self.index.get(id).and_then(|entry| self.looks(&entry)) {
            Some(line) => self.append(id, &[line]).await,
            None => Ok(()),
        }
    }

    /// The same where it happened already, and nobody can wait for the store. A sandbox that failed is kept so: its removal knows no more
    /// than that it is to go.
    pub(super) async fn keep_looks_if_possible(&self, id: SandboxId) {
        if let Err(error) = self.keep_looks(id).await {
            warn!(sandbox = %id, %error, "how a sandbox looked could not be kept");
        }
    }

    /// The line after which nothing of the sandbox is left.
    pub(super) fn last_line(&self, why: &str) -> EventRecord {
        self.event(REMOVED, why)
    }

    /// The sandbox is gone, and no intent of ours goes with that. `looked`: how it looked, where that is not kept yet.
    pub(super) async fn ended(&self, id: SandboxId, looked: Option<EventRecord>, why: &str) {
        let lines: Vec<_> = looked.into_iter().chain([self.last_line(why)]).collect();
        if let Err(error) = self.append(id, &lines).await {
            warn!(sandbox = %id, %error, "the end of a sandbox could not be recorded");
        }
    }

    /// The store knows a sandbox from a repository, and nothing else does: its box went while no server looked. Its history gets the end that
    /// it lacks: by its expiry if that has passed, else it is lost. Once, however often it is asked for.
    ///
    /// # Errors
    /// When the store cannot be read or written; to be asked again.
    pub async fn ended_unseen(&self, id: SandboxId) -> Result<(), StoreError> {
        if self.index.get(id).is_some() {
            return Ok(());
        }
        let Some(known) = self.known_of(id).await? else { return Ok(()) };
        info!(sandbox = %id, "the box of a sandbox went while no server looked");
        let expired = known.expires_at.is_some_and(|at| at <= self.clock.now());
        let lines = if expired {
            vec![self.last_line(RemoveReason::Expired.word())]
        } else {
            let failure = Failure::new(
                Reason::RuntimeLost,
                "the sandbox's box was removed while no server looked, and not by one",
            );
            let last = format!("{}, {}", failure.reason.word(), failure.message);
            vec![self.event(GIVEN_UP, &told(&failure, "Running").to_string()), self.last_line(&last)]
        };
        self.append(id, &lines).await
    }

    /// What the history of a sandbox tells that has no end; `None` when it has one, or there is none.
    async fn known_of(&self, id: SandboxId) -> Result<Option<Known>, StoreError> {
        let (mut known, mut after) = (Known::default(), 0);
        loop {
            let page = self.store.history_after(id, after, PAGE).await?;
            let Some(last) = page.last() else { return Ok((after > 0).then_some(known)) };
            after = last.seq;
            if page.iter().any(|line| line.event.kind == REMOVED) {
                return Ok(None);
            }
            page.iter().for_each(|line| known.take(line));
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Known {
    expires_at: Option<Timestamp>,
}

impl Known {
    fn take(&mut self, line: &SequencedEvent) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Looked {
            expires_at: Option<String>,
        }
        let told = match line.event.kind.as_str() {
            RECORD => match serde_json::from_str::<Looked>(&line.event.message) {
                Ok(looked) => looked.expires_at,
                Err(_) => return,
            },
            RENEWED => line.event.message.split(',').next().map(str::to_owned),
            _ => return,
        };
        let told = told.and_then(|at| at.trim().parse::<jiff::Timestamp>().ok());
        self.expires_at = told.map(|at| Timestamp::clamped(at.as_millisecond()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_expiry_counts() {
        let line = |kind: &str, message: &str| SequencedEvent {
            seq: 1,
            event: EventRecord { at: Timestamp::clamped(0), kind: kind.into(), message: message.into() },
        };
        let mut known = Known::default();
        let mut after = |kind: &str, message: &str| {
            known.take(&line(kind, message));
            known.expires_at.map(|at| at.to_string())
        };
        assert_eq!(
            after(RECORD, r#"{"expiresAt":"2030-01-01T00:00:00Z"}"#).as_deref(),
            Some("2030-01-01T00:00:00Z")
        );
        assert_eq!(after("ready", "x").as_deref(), Some("2030-01-01T00:00:00Z"));
        let renewed = "2031-01-01T00:00:00Z, because it is in use";
        assert_eq!(after(RENEWED, renewed).as_deref(), Some("2031-01-01T00:00:00Z"));
        assert_eq!(after(RECORD, "{}"), None, "it never expires");
    }
}
