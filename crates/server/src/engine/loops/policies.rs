//! Work for this loop: sandboxes with policies, and the rows of their use. Not its work: pausing, copying or removing them; it only commits the
//! intents and accepts the snapshots. Twice at once: everything is conditional, and an action is begun under the facts lock. Idle cost: one
//! pass over the index a second.

use std::{sync::Arc, time::Duration};

use tracing::warn;

use crate::engine::{Engine, policies::LONGEST_SLEEP};

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            let wait = run(&engine_).await;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stopping.cancelled() => {
                    engine_.keep_usages(true).await;
                    return;
                }
            }
        }
    });
}

async fn run(engine: &Arc<Engine>) -> Duration {
    let mut next = None;
    // What is known may be old while the runtime is away.
    if engine.reachable().is_ok() {
        for id in engine.index.with_policies() {
            match engine.judge(id).await {
                Ok(Some(at)) => next = Some(next.map_or(at, |known| at.min(known))),
                Ok(None) => {}
                Err(error) => warn!(sandbox = %id, %error, "a policy could not take effect; trying again"),
            }
        }
    }
    engine.keep_usages(false).await;
    let now = engine.clock.now();
    next.map_or(LONGEST_SLEEP, |at| now.until(at).clamp(Duration::from_millis(5), LONGEST_SLEEP))
}
