//! Turns: waiting builds are begun as there is room, and ended when they waited too long.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::ImageBuildId;
use tracing::warn;

use super::{Driver, change::Draft};
use crate::{
    build::BuildState,
    decide::{
        ending::{self, Outcome},
        schedule,
    },
};

/// Between two looks at most: another server may have let go of a tenant's share.
const LOOK_AT_LEAST: Duration = Duration::from_secs(5);

impl Driver {
    pub(super) async fn give_turns(self: Arc<Self>) {
        loop {
            let wait = match self.ports.store.open_builds(self.ports.engine.name()).await {
                Ok(rows) => {
                    let busy = self.mine().len();
                    let turns = schedule::turns(&rows, busy, self.rules(), self.now());
                    for id in turns.overdue {
                        self.spawn_for(id, |driver| driver.overdue(id));
                    }
                    for id in turns.start {
                        self.spawn_for(id, |driver| driver.work(id));
                    }
                    turns.next_at.map_or(LOOK_AT_LEAST, |at| self.now().until(at))
                }
                Err(error) => {
                    warn!(%error, "the waiting builds cannot be read; trying again");
                    self.settings.store_retry
                }
            };
            tokio::select! {
                () = self.turn.notified() => {}
                // A deadline that was just missed by rounding is not asked for in a busy loop.
                () = tokio::time::sleep(wait.clamp(Duration::from_millis(1), LOOK_AT_LEAST)) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// Ends a build that waited too long.
    async fn overdue(self: Arc<Self>, id: ImageBuildId) {
        let now = self.now();
        let ended = self
            .end_row(id, |row| {
                if row.state != BuildState::Queued || row.deadline_at > now {
                    return Ok(None);
                }
                let ending = ending::after_attempt(row, &Outcome::PastDeadline, None, self.rules(), now)?;
                // Having waited says nothing about the build itself.
                Ok(Some(Draft { row: ending.row, image: None, negative: None }))
            })
            .await;
        if let Some(Err(why)) = ended {
            warn!(build = %id, %why, "a build that waited too long cannot be ended");
        }
        self.clear(id).await;
    }
}
