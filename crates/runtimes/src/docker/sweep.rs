//! Remains of boxes that are not there any more: what a killed server, or another one, left behind.
//!
//! Run whenever the engine is reached anew. Careful rather than thorough: another server may be working on the same engine, and side files
//! may belong to boxes of another engine.

use std::{collections::HashSet, time::Duration};

use sandglass_sandbox::{Clock, SandboxId, SystemClock, Timestamp};
use tracing::{info, warn};

use super::{Shared, container::Container, labels, side_facts::SideFacts};

/// A sidecar is made before its box; one that is younger may just be waiting for it.
const SIDECAR_AGE: Duration = Duration::from_secs(300);
/// How long after its expiry a box that is not there is certainly nowhere.
const EXPIRED_AGE: Duration = Duration::from_secs(3600);
/// Side files without an expiry that nobody has touched for so long.
const FORGOTTEN_AGE: Duration = Duration::from_secs(30 * 24 * 3600);

impl Shared {
    /// Everything that ended servers and engines have left to do.
    pub(super) async fn mend(&self, present: &HashSet<SandboxId>) {
        self.sweep(present).await;
        self.thaw_forgotten().await;
    }

    /// `present`: the boxes of the list that was just taken.
    async fn sweep(&self, present: &HashSet<SandboxId>) {
        self.sweep_sidecars(present).await;
        self.sweep_own_images().await;
        if let Err(error) = self.read_ports().await {
            warn!(error = %error, "the ports of existing sandboxes cannot be read");
        }
        let (side_facts, assigned) = (self.side_facts.clone(), self.assigned.clone());
        let present = present.clone();
        let swept = tokio::task::spawn_blocking(move || {
            assigned.sweep(&present);
            for id in nobodys(&side_facts, &present) {
                if let Err(error) = side_facts.remove(id) {
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

/// Sandboxes that have side files and are certainly nowhere any more.
fn nobodys(side_facts: &SideFacts, present: &HashSet<SandboxId>) -> Vec<SandboxId> {
    let forgotten = side_facts.untouched_for(FORGOTTEN_AGE);
    let untouched = side_facts.untouched_for(EXPIRED_AGE).into_iter();
    let expired = |id: SandboxId| side_facts.read(id).expires_at.flatten().is_some_and(is_long_past);
    untouched.filter(|id| !present.contains(id) && (expired(*id) || forgotten.contains(id))).collect()
}

fn is_old(sidecar: &Container) -> bool {
    sidecar.created_at.is_some_and(|at| at.until(SystemClock.now()) >= SIDECAR_AGE)
}

fn is_long_past(at: Timestamp) -> bool {
    at.until(SystemClock.now()) >= EXPIRED_AGE
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, fs::File, time::SystemTime};

    use sandglass_sandbox::spec::MutableFacts;

    use super::*;

    #[test]
    fn side_files_go_only_when_their_sandbox_is_certainly_gone() {
        let dir = tempfile::tempdir().unwrap();
        let side = SideFacts::new(dir.path());
        let now = SystemClock.now().as_millis();
        let hours = |n: i64| Some(Timestamp::clamped(now + n * 3_600_000));
        let metadata = BTreeMap::from([("a".to_owned(), "b".to_owned())]);
        let made = |expires_at: Option<Timestamp>, untouched: u64| {
            let id = SandboxId::random();
            let created = MutableFacts { expires_at: hours(1), metadata: BTreeMap::new() };
            let changed = if expires_at.is_some() {
                MutableFacts { expires_at, ..created.clone() }
            } else {
                MutableFacts { metadata: metadata.clone(), ..created.clone() }
            };
            side.write(id, &created, &changed).unwrap();
            let at = SystemTime::now() - Duration::from_secs(untouched * 3600);
            for folder in ["", "_expiration"] {
                if let Ok(file) =
                    File::options().write(true).open(dir.path().join(folder).join(format!("{id}.json")))
                {
                    file.set_modified(at).unwrap();
                }
            }
            id
        };
        let gone = made(hours(-2), 5);
        let _just_expired = made(hours(-2), 0);
        let _lives_elsewhere = made(hours(9), 5);
        let there = made(hours(-2), 5);
        let _patched_elsewhere = made(None, 48);
        let forgotten = made(None, 24 * 31);
        let found: HashSet<_> = nobodys(&side, &HashSet::from([there])).into_iter().collect();
        assert_eq!(found, HashSet::from([gone, forgotten]));
    }
}
