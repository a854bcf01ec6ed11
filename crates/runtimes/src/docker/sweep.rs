//! Remains of boxes that are not there any more: what a killed server, or another one, left behind.
//!
//! Run whenever the engine is reached anew. Careful rather than thorough: another server may be working on the same engine, and side files
//! may belong to boxes of another engine.

use std::{collections::HashSet, time::Duration};

use sandglass_sandbox::{Clock, SandboxId, SystemClock, Timestamp};
use tracing::{info, warn};

use super::{Shared, container::Container, labels};

/// A sidecar is made before its box; one that is younger may just be waiting for it.
const SIDECAR_AGE: Duration = Duration::from_secs(300);
/// How long after its expiry a box that is not there is certainly nowhere.
const EXPIRED_AGE: Duration = Duration::from_secs(3600);
/// Side files without an expiry that nobody has touched for so long.
const FORGOTTEN_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

impl Shared {
    /// `present`: the boxes of the list that was just taken.
    pub(super) async fn sweep(&self, present: &HashSet<SandboxId>) {
        self.sweep_sidecars(present).await;
        if let Err(error) = self.read_ports().await {
            warn!(error = %error, "the ports of existing sandboxes cannot be read");
        }
        let side_facts = self.side_facts.clone();
        let present = present.clone();
        let swept = tokio::task::spawn_blocking(move || {
            for id in side_facts.untouched_for(EXPIRED_AGE) {
                let expired = side_facts.read(id).expires_at.flatten().is_some_and(is_long_past);
                let forgotten = || side_facts.untouched_for(FORGOTTEN_AGE).contains(&id);
                if !present.contains(&id)
                    && (expired || forgotten())
                    && let Err(error) = side_facts.remove(id)
                {
                    warn!(sandbox = %id, error = %error, "side files of a sandbox that is gone stay");
                }
            }
        });
        if let Err(error) = swept.await {
            warn!(error = %error, "side files were not swept");
        }
    }

    async fn sweep_sidecars(&self, present: &HashSet<SandboxId>) {
        let sidecars = match self.containers_with(labels::SIDECAR_FOR).await {
            Ok(sidecars) => sidecars,
            Err(error) => return warn!(error = %error, "sidecars cannot be listed"),
        };
        let orphans: HashSet<SandboxId> = sidecars
            .iter()
            .filter(|sidecar| is_old(sidecar))
            .filter_map(|sidecar| labels::sidecar_of(&sidecar.labels))
            .filter(|id| !present.contains(id) && !self.making().contains(id))
            .collect();
        for id in orphans {
            match self.remove_orphans(id).await {
                Ok(()) => info!(sandbox = %id, "the sidecar of a sandbox that is gone was removed"),
                Err(error) => {
                    warn!(sandbox = %id, error = %error, "the sidecar of a sandbox that is gone stays")
                }
            }
        }
    }
}

fn is_old(sidecar: &Container) -> bool {
    sidecar.created_at.is_some_and(|at| at.until(SystemClock.now()) >= SIDECAR_AGE)
}

fn is_long_past(at: Timestamp) -> bool {
    at.until(SystemClock.now()) >= EXPIRED_AGE
}
