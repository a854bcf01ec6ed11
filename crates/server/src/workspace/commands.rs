//! Commands to agents, and waiting for what came of them.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_bridge::{
    server::LeaseState,
    wire::{Command, Outcome, Refusal},
};
use sandglass_sandbox::SandboxId;
use tokio::sync::oneshot;

use super::{Workspaces, answer::wall};

/// Why a command was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotCommanded {
    #[error("the sandbox has no agent that takes commands")]
    NoAgent,
    #[error("the agent of the sandbox is not connected at the moment")]
    NotConnected,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the agent refused ({code}): {message}")]
    Failed { code: String, message: String },
}

/// Who waits for which command.
#[derive(Default)]
pub(super) struct Waiting(Mutex<HashMap<String, oneshot::Sender<Outcome>>>);

impl Waiting {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, oneshot::Sender<Outcome>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A command ended.
    pub(super) fn settle(&self, command: &str, outcome: Outcome) {
        if let Some(waiting) = self.lock().remove(command) {
            // Whoever asked may have left.
            let _ = waiting.send(outcome);
        }
    }
}

impl Workspaces {
    /// Tells an agent to do something, and waits for its answer. `patience` bounds the time.
    ///
    /// # Errors
    /// When there is no agent that could, it refused, or did not answer in time.
    pub async fn command(
        &self,
        id: SandboxId,
        command: &Command,
        patience: Duration,
    ) -> Result<serde_json::Value, NotCommanded> {
        let desk = self.desk(id).ok_or(NotCommanded::NoAgent)?;
        let name = id.to_string();
        let done = {
            let mut registry = self.registry();
            match registry.lease_state(&name) {
                None => return Err(NotCommanded::NoAgent),
                Some(state) if !state.is_attached() || state == LeaseState::Held => {
                    return Err(NotCommanded::NotConnected);
                }
                Some(_) => {}
            }
            let now = self.monotonic.now();
            let queued = registry.enqueue(&name, command, Some(patience), now, wall(self.clock.now()))?;
            let (settle, done) = oneshot::channel();
            // Under the registry's lock: its answer cannot come before somebody waits.
            self.commands.lock().insert(queued.as_str().to_owned(), settle);
            done
        };
        desk.stirred.notify_waiters();
        self.sooner.notify_one();
        match done.await {
            Ok(Outcome::Done(value)) => Ok(value),
            Ok(Outcome::Failed(error)) => {
                Err(NotCommanded::Failed { code: error.code, message: error.message })
            }
            Err(_) => Err(NotCommanded::NotConnected),
        }
    }
}
