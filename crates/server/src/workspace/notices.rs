//! What the registry notices, acted on: one task for the deadlines, one for what came of them.

use std::{sync::Arc, time::Duration};

use sandglass_bridge::{
    server::{LeaseState, Notice},
    wire::Outcome,
};
use sandglass_sandbox::{
    SandboxId,
    lifecycle::boot::{Failure, Reason},
    ports::runtime::Condition,
};
use serde_json::json;
use tokio::{sync::mpsc, time::Instant};
use tracing::{info, warn};

use super::{Workspaces, desk::Desk, told};

/// The longest sleep of the timer.
const IDLE: Duration = Duration::from_secs(60);
/// Before a store or a runtime that failed is tried again.
const RETRY: Duration = Duration::from_secs(1);

pub(super) fn spawn(workspaces: &Arc<Workspaces>, mut told: mpsc::UnboundedReceiver<Notice>) {
    let timer = workspaces.clone();
    workspaces.tasks.spawn(async move {
        loop {
            let due = timer.registry().next_due();
            let next = due.map_or_else(|| Instant::now() + IDLE, |due| timer.monotonic.instant(due));
            tokio::select! {
                () = tokio::time::sleep_until(next) => {}
                () = timer.sooner.notified() => continue,
                () = timer.stopping.cancelled() => return,
            }
            timer.with_registry(|registry, now| registry.advance(now));
        }
    });
    let taking = workspaces.clone();
    workspaces.tasks.spawn(async move {
        loop {
            tokio::select! {
                notice = told.recv() => match notice {
                    // Each in a task of its own: one sandbox's store or runtime holds up no other.
                    Some(notice) => drop(taking.tasks.spawn({
                        let workspaces = taking.clone();
                        async move { workspaces.take(notice).await }
                    })),
                    None => return,
                },
                () = taking.stopping.cancelled() => return,
            }
        }
    });
}

impl Workspaces {
    fn desk_of(&self, sandbox: &sandglass_bridge::wire::SandboxId) -> Option<Arc<Desk>> {
        self.desk(sandbox.as_str().parse::<SandboxId>().ok()?)
    }

    async fn take(self: &Arc<Self>, notice: Notice) {
        match notice {
            Notice::Attached { sandbox, epoch, new_boot } => {
                let Some(desk) = self.desk_of(&sandbox) else { return };
                // An earlier stream of commands ends now.
                desk.stirred.notify_waiters();
                let version = desk.kept().agent_version;
                let data = json!({"epoch": epoch, "newBoot": new_boot, "version": version});
                self.record(&desk, |kept, now| told::attached(kept, &data, now)).await;
            }
            Notice::Live { sandbox, recovered, epoch } => {
                let Some(desk) = self.desk_of(&sandbox).filter(|_| recovered) else { return };
                info!(sandbox = %desk.id, "the agent is heard again");
                let data = json!({"epoch": epoch, "recovered": true});
                self.record(&desk, |kept, now| told::attached(kept, &data, now)).await;
            }
            Notice::Unresponsive { sandbox, .. } => {
                let Some(desk) = self.desk_of(&sandbox) else { return };
                let still =
                    || self.registry().lease_state(sandbox.as_str()) == Some(LeaseState::Unresponsive);
                if still() {
                    warn!(sandbox = %desk.id, "the agent is not heard any more");
                    self.record(
                        &desk,
                        |kept, now| if still() { told::expired(kept, now) } else { Vec::new() },
                    )
                    .await;
                }
            }
            Notice::Lost { sandbox, epoch } => {
                if let Some(desk) = self.desk_of(&sandbox) {
                    self.lost(&desk, epoch).await;
                }
            }
            Notice::CommandExpired { command, .. } => {
                self.commands.settle(
                    command.as_str(),
                    Outcome::failed("AGENT::NO_ANSWER", "the agent did not answer in time"),
                );
            }
            Notice::CommandAbandoned { command, .. } => {
                self.commands.settle(
                    command.as_str(),
                    Outcome::failed("SANDBOX::GONE", "the sandbox ended before its agent answered"),
                );
            }
        }
    }

    /// Writes what happened to the channel until the store takes it, or the sandbox is gone.
    async fn record(
        self: &Arc<Self>,
        desk: &Desk,
        change: impl Fn(
            &mut super::desk::Kept,
            sandglass_sandbox::Timestamp,
        ) -> Vec<sandglass_sandbox::ports::store::EventRecord>,
    ) {
        loop {
            let now = self.clock.now();
            match self.write(desk, None, |kept| change(kept, now)).await {
                Ok(()) => return,
                Err(error) => {
                    warn!(sandbox = %desk.id, %error, "what happened to an agent cannot be written")
                }
            }
            if self.pause(desk).await {
                return;
            }
        }
    }

    /// Returns whether there is no sense in going on.
    async fn pause(&self, desk: &Desk) -> bool {
        tokio::select! {
            () = tokio::time::sleep(RETRY) => false,
            () = desk.closing.cancelled() => true,
            () = self.stopping.cancelled() => true,
        }
    }

    /// Nothing was heard through the grace, or nobody attached in time. What the runtime shows decides: a box that ended or froze has its
    /// own story, and of a runtime that cannot be asked nothing is concluded.
    async fn lost(self: &Arc<Self>, desk: &Arc<Desk>, epoch: u64) {
        let name = desk.id.to_string();
        loop {
            if self.registry().lease_state(&name) != Some(LeaseState::Lost) {
                return;
            }
            let Some(engine) = self.engine() else { return };
            match engine.look_at(desk.id).await {
                Ok(Some(observed)) => match observed.condition {
                    Condition::Running => break,
                    Condition::Paused => {
                        self.with_registry(|registry, now| registry.hold(&name, now));
                        return;
                    }
                    Condition::Exited(_) => return,
                    Condition::Starting => {}
                },
                Ok(None) => return,
                Err(error) => warn!(sandbox = %desk.id, %error, "a silent sandbox cannot be looked at"),
            }
            if self.pause(desk).await {
                return;
            }
        }
        if !self.with_registry(|registry, _| registry.condemn(&name, epoch)) {
            return;
        }
        let ready = desk.kept().facts.ready_at.is_some();
        let failure = if epoch == 0 && !ready {
            Failure::new(Reason::AgentConnectTimeout, "the agent of the sandbox did not attach in time")
        } else {
            Failure::new(
                Reason::HeartbeatLost,
                "the agent of the sandbox has fallen silent, although the sandbox runs",
            )
        };
        self.record(desk, |kept, _| {
            kept.facts.failure.get_or_insert_with(|| failure.clone());
            Vec::new()
        })
        .await;
    }
}
