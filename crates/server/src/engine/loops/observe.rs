//! Work for this loop: what the runtime reports. Not its work: deciding; it stores the facts and pokes the sandbox's driver. Idle cost: none.

use std::sync::Arc;

use futures_util::StreamExt;
use sandglass_sandbox::{
    SandboxId,
    lifecycle::{
        intent::Operation,
        state::{State, Status},
    },
    ports::runtime::{Condition, Observation, RuntimeEvent},
};
use tracing::{info, warn};

use crate::engine::{
    Engine,
    history::{OF_EGRESS, REMOVED},
    index::News,
};

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
            if awaited(engine, &observed) {
                return;
            }
            self::observed(engine, *observed).await;
            if engine.index.get(id).is_some_and(|e| e.intent.is_some()) {
                engine.poke(id);
            }
        }
        RuntimeEvent::Removed(id) => {
            if engine.working().contains(&id) {
                return;
            }
            if vanished(engine, id, "by its runtime").await {
                engine.poke(id);
            }
        }
        RuntimeEvent::Happened(id, event) => {
            info!(sandbox = %id, kind = event.kind, message = event.message, "box event");
            if event.kind.starts_with(OF_EGRESS) {
                // Whoever follows the sandbox wants these when they happen; they are as many as the box's supervisor lets through.
                engine.note(id, &event.kind, &event.message).await;
            }
        }
        RuntimeEvent::Lost(error) => engine.lose(error),
        RuntimeEvent::Back => engine.found_again(),
        RuntimeEvent::Noticed(id, event) => {
            warn!(sandbox = %id, kind = event.kind, message = event.message, "noticed");
            engine.note(id, &event.kind, &event.message).await;
        }
    }
}

/// Whether the driver is about to learn this by itself: the runtime's answer to its call is newer, and comes with the line of history. An end is
/// no answer to any call on a box that is up.
fn awaited(engine: &Engine, observed: &Observation) -> bool {
    let up = engine.index.get(observed.id).is_some_and(|e| e.observed.is_some());
    let ended = matches!(observed.condition, Condition::Exited(_));
    engine.working().contains(&observed.id) && !(up && ended)
}

/// Takes an observation, and writes down what it tells that no operation of ours brought about.
pub(in crate::engine) async fn observed(engine: &Arc<Engine>, observed: Observation) -> News {
    let (id, condition) = (observed.id, observed.condition.clone());
    let _change = engine.changing(id);
    let news = engine.observe(observed);
    if news != News::ConditionChanged {
        return news;
    }
    let Some(entry) = engine.index.get(id) else { return news };
    match condition {
        Condition::Exited(exit) => {
            info!(sandbox = %id, message = exit.message, "the box ended");
            engine.note(id, end(entry.status()), &exit.message).await;
        }
        // During an operation its driver writes the history.
        Condition::Paused if entry.intent.is_none() => engine.note(id, "paused_outside", "").await,
        Condition::Running if entry.intent.is_none() => engine.note(id, "resumed_outside", "").await,
        Condition::Starting | Condition::Running | Condition::Paused => {}
    }
    news
}

/// The kind of the line that tells how a box ended.
fn end(status: Option<Status>) -> &'static str {
    match status {
        Some(Status { state: State::Failed, reason, .. }) => match reason {
            "OUT_OF_MEMORY" => "out_of_memory",
            "ENTRYPOINT_FAILED" => "entrypoint_failed",
            "SUPERVISOR_LOST" => "supervisor_lost",
            "EGRESS_LOST" => "egress_lost",
            _ => "exited_error",
        },
        _ => "exited",
    }
}

/// The box is gone, and not by a removal of ours.
pub(in crate::engine) async fn vanished(engine: &Arc<Engine>, id: SandboxId, how: &str) -> bool {
    let _change = engine.changing(id);
    if !engine.vanished(id) {
        return false;
    }
    // During our own removal the driver writes the history; a create that is still wanted makes the box again.
    let ours =
        engine.index.get(id).and_then(|e| e.intent).is_some_and(|intent| {
            matches!(intent.operation, Operation::Remove { .. } | Operation::Create(_))
        });
    if !ours {
        info!(sandbox = %id, how, "the sandbox was not removed by this server");
        engine.note(id, REMOVED, how).await;
    }
    true
}
