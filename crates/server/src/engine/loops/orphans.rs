//! Work for this loop: half-made boxes that no create is working on, left by a server that died. Not its work: a create in flight, whose
//! driver finishes or clears its box; it only commits the removal. Twice at once: the second commit finds the intent. Idle cost: one pass over the
//! index every 15 s.

use std::{collections::HashMap, sync::Arc, time::Duration};

use sandglass_sandbox::{SandboxId, Timestamp, lifecycle::intent::RemoveReason};
use tracing::{info, warn};

use crate::engine::Engine;

const PERIOD: Duration = Duration::from_secs(15);

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        // Since when each has been seen without an owner: the box's own age says nothing about that.
        let mut seen = HashMap::new();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = stopping.cancelled() => return,
            }
            run(&engine_, &mut seen).await;
        }
    });
}

async fn run(engine: &Arc<Engine>, seen: &mut HashMap<SandboxId, Timestamp>) {
    // What is known may be old while the runtime is away.
    if engine.reachable().is_err() {
        return;
    }
    let now = engine.clock.now();
    let ownerless = engine.index.half_made();
    seen.retain(|id, _| ownerless.contains(id));
    for id in ownerless {
        let since = *seen.entry(id).or_insert(now);
        if since.until(now) < engine.settings.orphan_grace {
            continue;
        }
        info!(sandbox = %id, "a half-made box that nobody waits for is removed");
        if let Err(error) = engine.want_removed(id, RemoveReason::CreateFailed).await {
            warn!(sandbox = %id, %error, "the removal of an orphan could not be committed; trying again");
        }
    }
}
