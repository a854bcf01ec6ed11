//! Removing a box and everything that was made for it.
//!
//! The application's container goes first and alone; only then the sidecar, volumes, mounted buckets and side files, all of which are found
//! again by the id. Invariant: a failure leaves what has not been removed findable, so that trying again finishes the job.

use std::time::Duration;

use bollard::query_parameters::{RemoveContainerOptions, StopContainerOptions};
use sandglass_sandbox::{
    SandboxId,
    ports::runtime::{RuntimeError, RuntimeEvent},
};
use tracing::{debug, warn};

use super::{
    Shared,
    container::{Container, Status},
    errors::{Failure, failed},
    labels::{self, Parsed},
    sidecar, windows,
};

/// How long a sidecar may take to end its connections.
const SIDECAR_GRACE: Duration = Duration::from_secs(9);
/// How long another's removal of the same container is waited for, and how often it is looked after.
const OTHERS_PATIENCE: Duration = Duration::from_secs(20);
const LOOK_AGAIN: Duration = Duration::from_millis(50);

impl Shared {
    pub(super) async fn remove(&self, id: SandboxId, grace: Duration) -> Result<(), RuntimeError> {
        let removing = self.memory.removing(id);
        let removed = self.remove_all(id, grace).await;
        drop(removing);
        if removed.is_ok() {
            self.watching.tell(RuntimeEvent::Removed(id));
        } else if let Ok(Some(observed)) = self.observe(id).await {
            // Its end was not told while it was ours.
            self.watching.tell(RuntimeEvent::Observed(Box::new(observed)));
        }
        removed
    }

    async fn remove_all(&self, id: SandboxId, grace: Duration) -> Result<(), RuntimeError> {
        let found = self.find(id).await.map_err(|e| e.during("remove"))?;
        let parsed = found.as_ref().and_then(|container| labels::parse(&container.labels));
        if let Some(container) = &found {
            if container.status == Status::Running && !grace.is_zero() {
                self.stop(&container.key, grace).await.map_err(|e| e.during("remove"))?;
            }
            self.remove_for_good(&container.key).await.map_err(|e| e.during("remove"))?;
        }
        self.remove_dependants(id, parsed.as_ref(), found.as_ref()).await?;
        self.forget(id).await;
        Ok(())
    }

    /// Nothing of the box is left.
    async fn forget(&self, id: SandboxId) {
        self.known().remove(&id);
        self.memory.forget(id, self.next_revision());
        self.ports.release(id);
        self.saves.forget(id);
        let (side_facts, assigned) = (self.side_facts.clone(), self.assigned.clone());
        let removed =
            tokio::task::spawn_blocking(move || side_facts.remove(id).and(assigned.remove(id))).await;
        if let Ok(Err(error)) = removed {
            warn!(sandbox = %id, error = %error, "its side files cannot be removed");
        }
    }

    /// The container went without us: the rest is removed as after our own removal.
    pub(super) async fn clean_after(&self, id: SandboxId, parsed: Option<&Parsed>) {
        match self.remove_dependants(id, parsed, None).await {
            Ok(()) => self.forget(id).await,
            Err(error) => warn!(sandbox = %id, error = %error, "remains of a sandbox that is gone stay"),
        }
    }

    async fn remove_dependants(
        &self,
        id: SandboxId,
        parsed: Option<&Parsed>,
        container: Option<&Container>,
    ) -> Result<(), RuntimeError> {
        if parsed.is_some_and(|parsed| !may_have_dependants(parsed, container)) {
            return Ok(());
        }
        let label = format!("{}={id}", labels::SIDECAR_FOR);
        for sidecar in self.containers_with(&label).await.map_err(|e| e.during("sidecar"))? {
            if sidecar.status == Status::Running
                && let Err(failure) = self.stop(&sidecar.key, SIDECAR_GRACE).await
            {
                debug!(sandbox = %id, error = %failure, "its sidecar did not end by itself");
            }
            self.remove_for_good(&sidecar.key).await.map_err(|e| e.during("sidecar"))?;
        }
        let mut volumes = parsed.map(|parsed| parsed.managed_volumes.clone()).unwrap_or_default();
        for own in [sidecar::runtime_volume(id), windows::oem_volume(id)] {
            if !volumes.contains(&own) {
                volumes.push(own);
            }
        }
        self.remove_volumes(id, &volumes).await?;
        let mounts = parsed.map(|parsed| parsed.ossfs_mounts.clone()).unwrap_or_default();
        self.release_object_stores(id, &mounts).await;
        Ok(())
    }

    /// Asks a container to end, and ends it after `grace`.
    async fn stop(&self, key: &str, grace: Duration) -> Result<(), Failure> {
        let seconds = i32::try_from(grace.as_millis().div_ceil(1000)).unwrap_or(i32::MAX);
        let options = StopContainerOptions { t: Some(seconds), signal: None };
        let stopped =
            self.client.call(|docker| async move { docker.stop_container(key, Some(options)).await }).await;
        match stopped {
            Err(failure) if !matches!(failure.status(), Some(304 | 404 | 409)) => Err(failure),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Kills and removes a container with its anonymous volumes. Absent is success; somebody else's removal is waited for.
    async fn remove_for_good(&self, key: &str) -> Result<(), Failure> {
        let options = || RemoveContainerOptions { v: true, force: true, link: false };
        let begun = tokio::time::Instant::now();
        loop {
            let asked = self
                .client
                .call(|docker| async move { docker.remove_container(key, Some(options())).await })
                .await;
            let failure = match asked {
                Ok(()) => return Ok(()),
                Err(failure) if failure.is_absent() => return Ok(()),
                Err(failure) => failure,
            };
            if !is_being_removed(&failure) || begun.elapsed() > OTHERS_PATIENCE {
                return Err(failure);
            }
            tokio::time::sleep(LOOK_AGAIN).await;
            if self.inspect_container(key).await?.is_none() {
                return Ok(());
            }
        }
    }

    /// Removes what was made for a box that is not there.
    pub(super) async fn remove_orphans(&self, id: SandboxId) -> Result<(), RuntimeError> {
        if self.find(id).await.map_err(|e| e.during("sweep"))?.is_some() {
            return Err(failed("sweep", "the sandbox has come up meanwhile"));
        }
        self.remove_dependants(id, None, None).await
    }
}

/// Two removals at once: the engine refuses the later one while the earlier goes on.
fn is_being_removed(failure: &Failure) -> bool {
    let Failure::Refused { status, message } = failure else { return false };
    let message = message.to_ascii_lowercase();
    (*status == 409 && message.contains("already in progress"))
        || (*status >= 409 && message.contains("no such container"))
        || (*status == 500 && message.contains("no such process"))
}

/// Whether something beside the container may exist. Asking the engine costs time that most removals need not spend.
fn may_have_dependants(parsed: &Parsed, container: Option<&Container>) -> bool {
    let Some(record) = &parsed.record else { return true };
    let windows = record.spec.platform.as_ref().is_some_and(windows::is_windows);
    windows
        || record.spec.egress.is_some()
        || container.is_some_and(|c| c.joined().is_some())
        || !parsed.managed_volumes.is_empty()
        || !parsed.ossfs_mounts.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_removal_that_somebody_else_has_begun_is_waited_for() {
        let refused = |status, message: &str| Failure::Refused { status, message: message.to_owned() };
        assert!(is_being_removed(&refused(409, "removal of container abc is already in progress")));
        assert!(!is_being_removed(&refused(409, "You cannot remove a running container abc")));
        assert!(!is_being_removed(&refused(
            500,
            "unable to remove filesystem for abc: device or resource busy"
        )));
        assert!(!is_being_removed(&Failure::TimedOut));
    }
}
