//! Work for this loop: sandboxes whose expiry has passed, failed creates nobody collected. Not its work: removing them; it only
//! commits the intent. Twice at once: the second commit finds the intent. Idle cost: one pass over the index a second.

use std::{sync::Arc, time::Duration};

use tracing::warn;

use crate::engine::Engine;

/// The longest sleep, so that renewals, new sandboxes and a clock that jumped are seen.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            let wait = run(&engine_).await;
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stopping.cancelled() => return,
            }
        }
    });
}

async fn run(engine: &Arc<Engine>) -> Duration {
    let now = engine.clock.now();
    let (due, next) = engine.index.expiring(now, engine.settings.failed_create_retention);
    for id in due {
        if let Err(error) = engine.expire(id).await {
            warn!(sandbox = %id, error = %error, "expiry could not be committed; trying again");
        }
    }
    next.map_or(LONGEST_SLEEP, |at| now.until(at).clamp(Duration::from_millis(5), LONGEST_SLEEP))
}
