//! What the server tells the box to do.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use sandglass_bridge::wire::{Command, Outcome};
use sandglass_supervise::service::ServiceError;
use tokio::time::Instant;

use super::{Workspace, link};
use crate::journal::{self, Level};

/// What a server is told that asks for what this agent cannot do.
const UNSUPPORTED: &str = "COMMAND::UNSUPPORTED";
const EXPIRED: &str = "COMMAND::EXPIRED";

/// Carries commands out, one after the other, as long as there is a channel.
pub(super) fn follow(workspace: &Arc<Workspace>) {
    let Some(mut commands) = workspace.link.take_commands() else { return };
    let workspace = Arc::clone(workspace);
    tokio::spawn(async move {
        while let Some(delivered) = commands.recv().await {
            let late = delivered.expires.is_some_and(|expires| expires <= Instant::now());
            let outcome = if late {
                Outcome::failed(EXPIRED, "the time for it was over when it arrived")
            } else {
                carry_out(&workspace, delivered.command).await
            };
            if let Some(handle) = workspace.link.handle() {
                handle.settle(delivered.id, outcome);
            }
        }
    });
}

async fn carry_out(workspace: &Workspace, command: Command) -> Outcome {
    let services = &workspace.services;
    match command {
        Command::Shutdown { grace_seconds, reason } => {
            journal::note(Level::Info, &format!("workspace: the server ends the box: {reason}"));
            let millis = grace_seconds.saturating_mul(1000).max(1);
            workspace.shared.grace.store(millis, Ordering::Relaxed);
            link::end_box();
            Outcome::done()
        }
        Command::ServiceStart { name } => told(services.start(&name).await),
        // Somebody wants it no more: nothing brings it back but being wanted again, and it is shown so.
        Command::ServiceStop { name } => told(services.disable(&name).await),
        Command::ServiceRestart { name } => told(services.restart(&name).await),
        Command::SnapshotQuiesce => {
            // A copy of the disks is about to be made: what is written shall be on them.
            let synced = tokio::task::spawn_blocking(rustix::fs::sync).await;
            if synced.is_ok() { Outcome::done() } else { Outcome::failed("SNAPSHOT::QUIESCE", "sync failed") }
        }
        Command::Ping | Command::SnapshotThaw | Command::ExpirationChanged { .. } => Outcome::done(),
        Command::EnvUpdate { env } => {
            let wrong = |name: &String| name.is_empty() || name.contains(['=', '\0']);
            if let Some(name) = env.reveal().keys().find(|name| wrong(name)) {
                let message = format!("{name:?} cannot be an environment variable");
                return Outcome::failed("SANDBOX::INVALID_PARAMETER", message);
            }
            let mut kept = workspace.shared.env.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            kept.extend(env.into_inner());
            Outcome::done()
        }
        Command::ServiceRotateCredentials { name, .. } => match services.snapshot(&name) {
            // None of the services here has a credential of its own: who reaches them was let in before.
            Some(_) => Outcome::failed(UNSUPPORTED, format!("the service \"{name}\" has no credentials")),
            None => told(Err(ServiceError::NotFound(name))),
        },
        Command::Unknown { kind } => {
            Outcome::failed(UNSUPPORTED, format!("this agent does not know the command {kind}"))
        }
    }
}

fn told(result: Result<(), ServiceError>) -> Outcome {
    match result {
        Ok(()) => Outcome::done(),
        Err(error) => Outcome::failed(error.code(), error.to_string()),
    }
}
