//! Work for this loop: what the runtime reports. Not its work: deciding; it stores the facts and pokes the sandbox's driver. Idle cost: none.

use std::sync::Arc;

use futures_util::StreamExt;
use sandglass_sandbox::ports::runtime::{Condition, Observation, RuntimeEvent};
use tracing::{info, warn};

use crate::engine::{Engine, index::News};

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let mut events = engine.runtime.watch();
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            tokio::select! {
                event = events.next() => match event {
                    Some(event) => take(&engine_, event).await,
                    None => return,
                },
                () = stopping.cancelled() => return,
            }
        }
    });
}

async fn take(engine: &Arc<Engine>, event: RuntimeEvent) {
    match event {
        RuntimeEvent::Observed(observed) => {
            let id = observed.id;
            // Seen between its start and its readiness; the start's own answer is newer.
            if engine.making().contains(&id) {
                return;
            }
            let exit = exit_message(&observed);
            let news = engine.index.observe(*observed);
            if news == News::ConditionChanged
                && let Some(message) = exit
            {
                info!(sandbox = %id, message, "the box ended");
                append(engine, id, "exited", &message).await;
            }
            if engine.index.get(id).is_some_and(|e| e.intent.is_some()) {
                engine.poke(id);
            }
        }
        RuntimeEvent::Removed(id) => {
            if engine.vanished(id) {
                // During our own removal the driver writes the history; this is the runtime acting alone.
                if !engine.index.get(id).is_some_and(|e| e.removing()) {
                    info!(sandbox = %id, "the runtime removed the sandbox by itself");
                    append(engine, id, "removed", "by its runtime").await;
                }
                engine.poke(id);
            }
        }
        RuntimeEvent::Happened(id, event) => {
            info!(sandbox = %id, kind = event.kind, message = event.message, "box event");
        }
        RuntimeEvent::Lost(error) => engine.lose(error),
        RuntimeEvent::Back => engine.found_again(),
        RuntimeEvent::Noticed(id, event) => {
            warn!(sandbox = %id, kind = event.kind, message = event.message, "noticed");
            append(engine, id, &event.kind, &event.message).await;
        }
    }
}

fn exit_message(observed: &Observation) -> Option<String> {
    match &observed.condition {
        Condition::Exited(exit) => Some(exit.message.clone()),
        _ => None,
    }
}

async fn append(engine: &Engine, id: sandglass_sandbox::SandboxId, kind: &str, message: &str) {
    let event = engine.event(kind, message);
    if let Err(error) = engine.store.append(id, &[event]).await {
        warn!(sandbox = %id, error = %error, "an event could not be recorded");
    }
}
