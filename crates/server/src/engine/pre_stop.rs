//! The command of a sandbox that runs before its end.
//!
//! Bounded, and never in the way: that it failed is a line of the history, and the removal goes on. A server that dies meanwhile leaves the
//! removal to the next one, which runs the command again.

use sandglass_sandbox::{
    SandboxId,
    lifecycle::intent::{Intent, Operation, RemoveReason},
    ports::runtime::Condition,
};
use serde_json::json;
use tracing::{info, warn};

use super::Engine;
use crate::builds::inside::{Command, Door};

impl Engine {
    /// Runs the hook, once a removal, when the sandbox is in a state to run it. Returns whether the removal goes on: not when the server ends.
    pub(super) async fn run_pre_stop(&self, id: SandboxId, intent: &Intent, reason: RemoveReason) -> bool {
        let first = matches!(intent.operation, Operation::Remove { last_error: None, .. });
        let Some(entry) = self.index.get(id).filter(|_| first && reason != RemoveReason::CreateFailed) else {
            return true;
        };
        let (Some(spec), Some(observed)) = (entry.spec(), entry.observed.as_deref()) else { return true };
        let Some(hook) = &spec.hooks.pre_stop else { return true };
        let was_ready = spec.source.is_none() || entry.agent.as_deref().is_some_and(|a| a.ready_at.is_some());
        let told = match &observed.condition {
            Condition::Running if was_ready => {
                let command = Command { argv: hook.command.clone(), ..Command::default() };
                let within = spec.hooks.pre_stop_timeout();
                let run = async {
                    let (inside, host) =
                        self.inside.get().ok_or("this server has no way into its sandboxes")?;
                    let door = Door::of(observed, *host)
                        .ok_or("the agent of the sandbox cannot be reached from here")?;
                    let ran = tokio::time::timeout(within, inside.run(&door, &command, &mut |_| {})).await;
                    match ran {
                        Ok(Ok(0)) => Ok(()),
                        Ok(Ok(code)) => Err(format!("it ended with {code}")),
                        Ok(Err(error)) => Err(error.to_string()),
                        Err(_) => Err(format!("it was not over within {} s", within.as_secs())),
                    }
                };
                tokio::select! {
                    ran = run => ran,
                    () = self.stopping.cancelled() => return false,
                }
            }
            Condition::Paused => Err("the sandbox is frozen, and is not thawed for it".to_owned()),
            // There is nobody to run it.
            Condition::Running | Condition::Starting | Condition::Exited(_) => return true,
        };
        match told {
            Ok(()) => {
                info!(sandbox = %id, "the hook before the end has run");
                self.note(id, "pre_stop", &json!({"exitCode": 0}).to_string()).await;
            }
            Err(message) => {
                warn!(sandbox = %id, message, "the hook before the end failed; the removal goes on");
                self.note(id, "pre_stop_failed", &json!({"message": message}).to_string()).await;
            }
        }
        true
    }
}
