//! Work for this loop: what the runtime reports. Not its work: deciding; it stores the facts and pokes the sandbox's driver. Idle cost: none.

use std::sync::Arc;

use futures_util::StreamExt;
use sandglass_sandbox::{
    SandboxId,
    lifecycle::{
        boot::{Failure, Reason},
        intent::{Operation, Progress},
        state::{State, Status},
    },
    ports::runtime::{Condition, Observation, RuntimeEvent},
};
use tracing::{info, warn};

use crate::engine::{
    Engine,
    history::OF_EGRESS,
    index::{Entry, News},
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
            // A box that replaces another one under its id may be there before this is read.
            if matches!(engine.runtime.inspect(id).await, Ok(Some(_))) {
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
            if !is_told_otherwise(&entry) {
                engine.note(id, end(entry.status()), &exit.message).await;
            }
        }
        // During an operation its driver writes the history.
        Condition::Paused if entry.intent.is_none() => engine.note(id, "paused_outside", "").await,
        Condition::Running if entry.intent.is_none() => {
            engine.note(id, "resumed_outside", "").await;
            engine.runs_again(id).await;
        }
        Condition::Starting | Condition::Running | Condition::Paused => {}
    }
    news
}

/// Whether the end of the box is a part of what history tells already: its removal, or the failure of its sandbox.
fn is_told_otherwise(entry: &Entry) -> bool {
    match entry.intent.as_deref().map(|intent| &intent.operation) {
        Some(Operation::Remove { .. }) => true,
        Some(Operation::Create(create)) => matches!(create.progress, Progress::Failed { .. }),
        _ => false,
    }
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

/// What it means that the box of a sandbox from a repository is gone: whoever asked for such a one waits for more than a box, and is told why it
/// ended. Nothing where it had to end, or ends by an operation of ours.
fn lost(engine: &Engine, id: SandboxId) -> Option<Failure> {
    let entry = engine.index.get(id)?;
    let observed = entry.observed.as_deref()?;
    let expired = observed.facts.expires_at.is_some_and(|at| at <= engine.clock.now());
    (observed.spec.source.is_some() && entry.intent.is_none() && !expired)
        .then(|| Failure::new(Reason::RuntimeLost, "the sandbox's box was removed, and not by this server"))
}

/// The box is gone, and not by a removal of ours.
pub(in crate::engine) async fn vanished(engine: &Arc<Engine>, id: SandboxId, how: &str) -> bool {
    if let Some(failure) = lost(engine, id)
        && let Err(error) = engine.give_up(id, failure).await
    {
        warn!(sandbox = %id, %error, "that the box of a sandbox is lost cannot be stored");
    }
    let _change = engine.changing(id);
    // During our own removal the driver writes the history; a create that is still wanted makes the box again.
    let is_ours =
        || {
            engine.index.get(id).and_then(|e| e.intent).is_some_and(|intent| {
                matches!(intent.operation, Operation::Remove { .. } | Operation::Create(_))
            })
        };
    // Before it leaves the index, so that who reads its history always finds whose it was.
    if engine.index.get(id).is_some_and(|entry| entry.observed.is_some()) && !is_ours() {
        engine.keep_looks_if_possible(id).await;
    }
    if !engine.vanished(id) {
        return false;
    }
    if !is_ours() {
        info!(sandbox = %id, how, "the sandbox was not removed by this server");
        engine.ended(id, None, how).await;
    }
    true
}
