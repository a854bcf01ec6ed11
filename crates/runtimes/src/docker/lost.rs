//! A box whose sidecar is gone: its network went with the sidecar's, and no engine gives it another one.
//!
//! Such a box is shown as ended, and then it is: nobody can reach it, and whoever made it relied on its policy. Nothing gets out meanwhile,
//! because the engine takes the network's interface away and the kernel's rules stay as long as anything runs there.

use bollard::query_parameters::KillContainerOptions;
use sandglass_sandbox::{
    Clock, SandboxId, SystemClock,
    ports::runtime::{Condition, Exit, ExitCause, Observation},
};
use tracing::{debug, warn};

use super::{
    Shared,
    container::{Container, Status},
};

/// How the engine tells that a container was killed.
const KILLED: i32 = 137;

/// How a box ended that lost its network; `None` when it has it, or ended for reasons of its own.
pub(super) fn lost(container: &Container, sidecar: Option<&Container>) -> Option<Exit> {
    container.joined()?;
    let lives = match container.status {
        Status::Running | Status::Paused => true,
        // By us, as soon as it was noticed; anything else that ends a box this way says so with another code.
        Status::Ended if container.exit_code == Some(KILLED) && !container.out_of_memory => false,
        Status::Created | Status::Ended => return None,
    };
    let (why, at) = match sidecar {
        None if lives => ("is gone".to_owned(), None),
        Some(sidecar) if sidecar.status == Status::Ended => {
            if !lives && sidecar.finished_at > container.finished_at {
                return None;
            }
            (ended(sidecar), sidecar.finished_at)
        }
        // Started again, it has a network of its own.
        Some(sidecar) if started_after(sidecar, container) => {
            ("was started again".to_owned(), sidecar.started_at)
        }
        None | Some(_) => return None,
    };
    Some(Exit {
        code: None,
        signal: None,
        cause: ExitCause::EgressLost,
        message: format!("its egress sidecar {why}, and its network with it"),
        at: at.unwrap_or_else(|| SystemClock.now()),
    })
}

fn ended(sidecar: &Container) -> String {
    let code = sidecar.exit_code.map_or_else(|| "an unknown code".to_owned(), |code| format!("code {code}"));
    let memory = if sidecar.out_of_memory { " (it used more memory than its limit)" } else { "" };
    format!("ended with {code}{memory}")
}

fn started_after(sidecar: &Container, container: &Container) -> bool {
    sidecar.started_at.zip(container.started_at).is_some_and(|(sidecar, container)| sidecar > container)
}

pub(super) fn is_lost(observed: &Observation) -> bool {
    matches!(&observed.condition, Condition::Exited(exit) if exit.cause == ExitCause::EgressLost)
}

impl Shared {
    /// Ends what still runs of a box that has lost its network.
    pub(super) async fn end_lost(&self, id: SandboxId) {
        let found = match self.find(id).await {
            Ok(Some(found)) if matches!(found.status, Status::Running | Status::Paused) => found,
            Ok(_) => return,
            Err(error) => return debug!(sandbox = %id, error = %error, "it could not be looked at"),
        };
        warn!(sandbox = %id, "its egress sidecar is gone; the sandbox is ended");
        let key = found.key.as_str();
        let killed = self
            .client
            .call(|docker| async move { docker.kill_container(key, None::<KillContainerOptions>).await })
            .await;
        if let Err(error) = killed
            && !matches!(error.status(), Some(404 | 409))
        {
            warn!(sandbox = %id, error = %error, "a sandbox without a network still runs");
        }
    }
}

#[cfg(test)]
mod tests {
    use bollard::models::ContainerInspectResponse;
    use sandglass_sandbox::Timestamp;

    use super::*;

    fn container(status: Status, code: Option<i32>, started: i64, finished: i64) -> Container {
        let mut container = Container::inspected(ContainerInspectResponse::default());
        container.status = status;
        container.exit_code = code;
        container.started_at = Timestamp::from_millis(started);
        container.finished_at = Timestamp::from_millis(finished);
        container.network_mode = "container:abc".into();
        container
    }

    #[test]
    fn a_box_lives_with_the_sidecar_that_it_was_started_with() {
        let running = container(Status::Running, None, 20, 0);
        let killed = container(Status::Ended, Some(137), 20, 50);
        let exited = container(Status::Ended, Some(0), 20, 50);
        let sidecar = |status, started, finished| container(status, Some(1), started, finished);
        let table = [
            (&running, Some(sidecar(Status::Running, 10, 0)), None),
            (&running, Some(sidecar(Status::Paused, 10, 0)), None),
            (&running, Some(sidecar(Status::Ended, 10, 40)), Some("ended with code 1")),
            (&running, Some(sidecar(Status::Running, 30, 0)), Some("was started again")),
            (&running, None, Some("is gone")),
            // Ended by us afterwards, by its own doing, or before the sidecar.
            (&killed, Some(sidecar(Status::Ended, 10, 40)), Some("ended with code 1")),
            (&killed, Some(sidecar(Status::Ended, 10, 60)), None),
            (&killed, Some(sidecar(Status::Running, 10, 0)), None),
            (&killed, None, None),
            (&exited, Some(sidecar(Status::Ended, 10, 40)), None),
        ];
        for (number, (box_, sidecar, expected)) in table.into_iter().enumerate() {
            let seen = lost(box_, sidecar.as_ref());
            assert_eq!(seen.is_some(), expected.is_some(), "case {number}");
            if let (Some(exit), Some(why)) = (seen, expected) {
                assert_eq!(exit.cause, ExitCause::EgressLost);
                assert!(exit.message.contains(why), "case {number}: {}", exit.message);
            }
        }
        let alone = Container { network_mode: "bridge".into(), ..running };
        assert_eq!(lost(&alone, None), None);
    }
}
