//! The boot of the workspace, from the plan to a running entrypoint.

use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use sandglass_sandbox::hooks::Hooks;
use sandglass_supervise::ports::{Entrypoint as Port, Program, SpawnError};
use sandglass_supervise::{Boot, Outcome};

use super::sync::Sync;
use super::{Workspace, plan};
use crate::http::router::Agent;
use crate::init::begin::NotStarted;
use crate::init::supervise::Entrypoint;
use crate::journal::{self, Level};

/// What a boot came to.
pub enum Begun {
    /// The box is ready; without an entrypoint it is held open.
    Ready(Option<Entrypoint>),
    Failed(NotStarted),
    /// Somebody ends the box.
    Cancelled,
}

impl Workspace {
    /// Runs the plan of the document, with the entrypoint of the box at its end.
    pub async fn boot(&self, agent: &Arc<Agent>, argv: &[String], hooks: &Hooks) -> Begun {
        let slot = Arc::new(Slot { agent: Arc::clone(agent), started: Mutex::new(None) });
        let boot = Boot {
            plan: plan::of(&self.document.workspace, argv, Some(hooks)),
            ports: self.ports.clone(),
            services: self.services.clone(),
            repositories: Arc::new(Sync::new(Arc::clone(agent), &self.document)),
            entrypoint: Arc::clone(&slot) as Arc<dyn Port>,
        };
        self.link.vitals().tell_of(&self.services);
        match boot.run(self.boot.clone()).await {
            Outcome::Ready { warnings } => {
                for warning in warnings {
                    journal::note(Level::Warning, &format!("workspace: {}", warning.message));
                }
                Begun::Ready(slot.take())
            }
            Outcome::Failed(failure) => Begun::Failed(NotStarted {
                phase: failure.step.phase.name(),
                message: failure.message,
                code: 1,
            }),
            Outcome::Cancelled { .. } => Begun::Cancelled,
        }
    }
}

/// Starts the entrypoint, and keeps it for the one who waits for its end.
struct Slot {
    agent: Arc<Agent>,
    started: Mutex<Option<Entrypoint>>,
}

impl Slot {
    fn take(&self) -> Option<Entrypoint> {
        self.started.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[async_trait]
impl Port for Slot {
    async fn start(&self, program: &Program) -> Result<(), SpawnError> {
        let started = Entrypoint::start(&self.agent, &program.argv).map_err(SpawnError::new)?;
        *self.started.lock().unwrap_or_else(PoisonError::into_inner) = started;
        Ok(())
    }
}
