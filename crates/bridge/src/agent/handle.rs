//! The way into a running bridge.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, mpsc, oneshot};

use crate::ring::{Draft, PushError, Ring};
use crate::wire::{CommandId, FatalReport, GitCredential, GitCredentialRequest, Outcome, Refusal};

use super::log_outbox::LogOutbox;
use super::transport::TransportError;

/// The way into a running bridge. Works without a connection, and to no effect after the end.
#[derive(Clone)]
pub struct Handle {
    pub(super) shared: Arc<Shared>,
    pub(super) wishes: mpsc::UnboundedSender<Wish>,
}

/// Why there is no credential.
#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("the server refused a credential")]
    Refused(#[source] Refusal),
    #[error("the server answered {0} instead of a credential")]
    Status(u16),
    #[error("the server's answer is not a credential")]
    Malformed(#[source] serde_json::Error),
    #[error("the server cannot be asked for a credential")]
    Transport(#[source] TransportError),
    #[error("the bridge has ended")]
    Ended,
}

/// What handle and task share.
pub(super) struct Shared {
    ring: Mutex<Ring>,
    logs: Mutex<LogOutbox>,
    pub wake: Notify,
}

/// What the owner wants of the task.
pub(super) enum Wish {
    Settle(CommandId, Outcome),
    Fatal(FatalReport),
    Drain,
    Credential(GitCredentialRequest, oneshot::Sender<Result<GitCredential, CredentialError>>),
}

impl Handle {
    /// Tells the server that something happened, as soon as it can be told. It is kept when this returns.
    pub fn emit(&self, draft: Draft) -> Result<u64, PushError> {
        let seq = self.shared.ring().push(draft)?;
        self.shared.wake.notify_one();
        Ok(seq)
    }

    /// Sends log bytes that begin at `offset` of their log.
    pub fn log(&self, source: &str, stream: &str, offset: u64, bytes: &[u8]) {
        self.shared.logs().push(source, stream, offset, bytes);
        self.shared.wake.notify_one();
    }

    /// Says how a command ended.
    pub fn settle(&self, command: CommandId, outcome: Outcome) {
        self.wish(Wish::Settle(command, outcome));
    }

    /// Reports the end of the box.
    pub fn fatal(&self, report: FatalReport) {
        self.wish(Wish::Fatal(report));
    }

    /// Ends the bridge once everything is delivered. Whoever cannot wait that long aborts the task.
    pub fn drain(&self) {
        self.wish(Wish::Drain);
    }

    /// Asks the server for a git credential.
    pub async fn git_credential(
        &self,
        request: GitCredentialRequest,
    ) -> Result<GitCredential, CredentialError> {
        let (answer, answered) = oneshot::channel();
        self.wish(Wish::Credential(request, answer));
        answered.await.unwrap_or(Err(CredentialError::Ended))
    }

    /// The ring, for [pull](crate::pull) mode and for status. Held only for moments.
    pub fn with_ring<T>(&self, use_it: impl FnOnce(&mut Ring) -> T) -> T {
        use_it(&mut self.shared.ring())
    }

    fn wish(&self, wish: Wish) {
        // After the end nobody listens, and nothing is to be done.
        let _ = self.wishes.send(wish);
    }
}

impl Shared {
    pub fn new(ring: Ring) -> Self {
        Self { ring: Mutex::new(ring), logs: Mutex::default(), wake: Notify::new() }
    }

    pub fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn logs(&self) -> MutexGuard<'_, LogOutbox> {
        self.logs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
