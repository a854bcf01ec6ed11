//! Work for this loop: differences between the index and a full list of the runtime that no event told. Twice at once: harmless. Idle cost: one list
//! every period.

use std::{collections::HashSet, sync::Arc};

use tracing::{info, warn};

use crate::engine::{Engine, index::News};

/// Pause between attempts to list a runtime that cannot be reached.
const WHILE_LOST: std::time::Duration = std::time::Duration::from_secs(1);

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            tokio::select! {
                () = tokio::time::sleep(pause(&engine_)) => {}
                () = stopping.cancelled() => return,
            }
            run(&engine_).await;
        }
    });
}

/// Enforcing an expiry and finishing a removal must not wait for long after the runtime came back.
fn pause(engine: &Engine) -> std::time::Duration {
    match engine.reachable() {
        Ok(()) => engine.settings.resync_every,
        Err(_) => WHILE_LOST.min(engine.settings.resync_every),
    }
}

async fn run(engine: &Arc<Engine>) {
    // Only boxes known before the list can be missed by it; one that starts meanwhile is none of our business.
    let known = engine.index.boxes();
    let waiting = engine.pools.boxes();
    let listed = match engine.runtime.list().await {
        Ok(listed) => listed,
        Err(error) => {
            if error.retryable() {
                engine.lose(error);
            } else {
                warn!(error = %error, "the runtime cannot be listed");
            }
            return;
        }
    };
    let present: HashSet<_> = listed.iter().map(|o| o.id).collect();
    for observed in listed {
        let id = observed.id;
        if super::observe::observed(engine, observed).await == News::ConditionChanged {
            info!(sandbox = %id, "a change was found by comparing lists");
            engine.poke(id);
        }
    }
    for (id, revision) in known {
        let same = engine.index.get(id).and_then(|e| e.observed).is_some_and(|o| o.revision == revision);
        if !present.contains(&id) && same {
            info!(sandbox = %id, "the box is gone");
            super::observe::vanished(engine, id, "found missing").await;
            engine.poke(id);
        }
    }
    for (id, revision) in waiting.into_iter().filter(|(id, _)| !present.contains(id)) {
        if engine.pools.missed(id, revision) {
            engine.forget_agent_of(id);
        }
    }
    engine.found_again();
}
