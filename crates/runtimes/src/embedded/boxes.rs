//! What this process knows of the boxes, and the channel on which changes are told.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::runtime::{BoxEvent, Condition, Exit, ExitCause, Exposure, Observation, RuntimeEvent},
};
use sandglass_shim::spec::{self as shim, BoxSpec, BoxState, Phase};
use tokio::{
    sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel},
    task::AbortHandle,
};

use super::{
    egress,
    plan::{About, facts_of_shim},
};

/// One box.
#[derive(Debug)]
pub(super) struct Known {
    pub spec: Arc<BoxSpec>,
    pub about: Arc<About>,
    pub facts: shim::MutableFacts,
    pub state: BoxState,
    pub since: Timestamp,
    /// The task that listens to the shim.
    pub listener: Option<AbortHandle>,
}

impl Known {
    fn condition(&self) -> Condition {
        match (self.state.phase, &self.state.exit) {
            (Phase::Creating, _) => Condition::Starting,
            (Phase::Running, _) if self.state.paused => Condition::Paused,
            (Phase::Running, _) => Condition::Running,
            (Phase::Exited, exit) => Condition::Exited(exit.as_ref().map_or_else(
                || Exit {
                    code: None,
                    signal: None,
                    cause: ExitCause::SupervisorLost,
                    message: "how the box ended was not recorded".into(),
                    at: self.since,
                },
                |e| Exit {
                    code: e.code,
                    signal: e.signal,
                    cause: cause(e.cause),
                    message: e.message.clone(),
                    at: Timestamp::clamped(e.at_ms),
                },
            )),
        }
    }
}

fn cause(cause: shim::ExitCause) -> ExitCause {
    match cause {
        shim::ExitCause::Exited => ExitCause::Exited,
        shim::ExitCause::Signalled => ExitCause::Signalled,
        shim::ExitCause::OutOfMemory => ExitCause::OutOfMemory,
        shim::ExitCause::EntrypointFailed => ExitCause::EntrypointFailed,
        shim::ExitCause::ShimLost => ExitCause::SupervisorLost,
        shim::ExitCause::CreateFailed => ExitCause::CreateFailed,
    }
}

/// The instant at which the state became what it is, as far as the records tell.
pub(super) fn since(state: &BoxState, spec: &BoxSpec) -> Timestamp {
    let exit = state.exit.as_ref().map(|e| e.at_ms);
    Timestamp::clamped(exit.or(state.started_at_ms).unwrap_or(spec.created_at_ms))
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Boxes {
    known: Mutex<HashMap<SandboxId, Known>>,
    revision: AtomicU64,
    tell: Mutex<Option<UnboundedSender<RuntimeEvent>>>,
    /// Images of boxes that are being made.
    making: Mutex<Vec<String>>,
}

/// Keeps an image from being removed for as long as it lives.
#[derive(Debug)]
pub(super) struct Pin<'a>(&'a Boxes, String);

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        let mut making = self.0.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = making.iter().position(|id| *id == self.1) {
            making.swap_remove(at);
        }
    }
}

impl Default for Boxes {
    fn default() -> Self {
        Self {
            known: Mutex::default(),
            revision: AtomicU64::new(1),
            tell: Mutex::new(None),
            making: Mutex::default(),
        }
    }
}

impl Boxes {
    pub(super) fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new channel of changes; replaces the one before.
    pub(super) fn watch(&self) -> UnboundedReceiver<RuntimeEvent> {
        let (tell, told) = unbounded_channel();
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = Some(tell);
        told
    }

    pub(super) fn tell(&self, event: RuntimeEvent) {
        if let Some(tell) = &*self.tell.lock().unwrap_or_else(PoisonError::into_inner) {
            // Nobody listening any more is no concern of ours.
            let _ = tell.send(event);
        }
    }

    pub(super) fn happened(&self, id: SandboxId, event: &shim::BoxEvent) {
        self.tell(RuntimeEvent::Happened(id, history(event)));
    }

    /// The facts as they stand, stamped under the lock so that stamps follow the order of changes.
    pub(super) fn observation(&self, id: SandboxId, known: &Known) -> Observation {
        Observation {
            id,
            revision: self.revision.fetch_add(1, Ordering::Relaxed),
            spec: known.about.spec.clone(),
            entrypoint: known.about.entrypoint.clone(),
            facts: facts_of_shim(&known.facts),
            condition: known.condition(),
            created_at: Timestamp::clamped(known.spec.created_at_ms),
            // A sandbox that was a warm box began with its assignment.
            started_at: known.about.assigned_at_ms.or(known.state.started_at_ms).map(Timestamp::clamped),
            since: known
                .about
                .assigned_at_ms
                .map_or(known.since, |at| known.since.max(Timestamp::clamped(at))),
            address: known.spec.network.as_ref().map(|n| n.address.into()),
            exposure: Exposure::Address,
            agent_token: known.spec.access_token.clone(),
            route_token: known.spec.route_token.clone(),
            egress_token: egress::token(&known.spec),
        }
    }

    pub(super) fn observe(&self, id: SandboxId) -> Option<Observation> {
        self.lock().get(&id).map(|known| self.observation(id, known))
    }

    pub(super) fn observe_all(&self) -> Vec<Observation> {
        self.lock().iter().map(|(id, known)| self.observation(*id, known)).collect()
    }

    /// Takes over a newer state and returns the facts that follow from it.
    pub(super) fn set_state(
        &self,
        id: SandboxId,
        state: BoxState,
        at: Option<Timestamp>,
    ) -> Option<Observation> {
        let mut boxes = self.lock();
        let known = boxes.get_mut(&id)?;
        if known.state != state {
            // An end has its own time, which is a moment before it was recorded.
            let told = at.filter(|_| state.exit.is_none());
            known.since = told.unwrap_or_else(|| since(&state, &known.spec));
            known.state = state;
        }
        Some(self.observation(id, known))
    }

    pub(super) fn pin(&self, image_id: &str) -> Pin<'_> {
        self.making.lock().unwrap_or_else(PoisonError::into_inner).push(image_id.to_owned());
        Pin(self, image_id.to_owned())
    }

    pub(super) fn image_ids(&self) -> BTreeSet<String> {
        let making = self.making.lock().unwrap_or_else(PoisonError::into_inner).clone();
        self.lock().values().map(|known| known.about.image_id.clone()).chain(making).collect()
    }
}

pub(super) fn history(event: &shim::BoxEvent) -> BoxEvent {
    BoxEvent { at: Timestamp::clamped(event.at_ms), kind: event.kind.clone(), message: event.message.clone() }
}
