//! Work for this loop: history and idempotency keys past their retention. Twice at once: harmless. Idle cost: one statement an hour.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::Timestamp;
use tracing::{debug, warn};

use crate::engine::Engine;

const PERIOD: Duration = Duration::from_secs(3600);

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            tokio::select! {
                () = tokio::time::sleep(PERIOD) => {}
                () = stopping.cancelled() => return,
            }
            let age = i64::try_from(engine_.settings.history_retention.as_millis()).unwrap_or(i64::MAX);
            let before = Timestamp::clamped(engine_.clock.now().as_millis().saturating_sub(age));
            match engine_.store.prune(before).await {
                Ok(rows) => debug!(rows, "pruned"),
                Err(error) => warn!(error = %error, "pruning failed; trying again in an hour"),
            }
        }
    });
}
