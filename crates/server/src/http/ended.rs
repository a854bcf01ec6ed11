//! Sandboxes of which nothing is left: shown for a day to those who ask for them, from what their history keeps.

use std::time::Duration;

use sandglass_api::lifecycle::{Sandbox, SandboxFailure, SandboxStatus};
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{boot::Reason, intent::Operation, state::State},
    ports::store::{EndedSandbox, StoreError},
};

use super::{App, present};
use crate::{engine::index::Entry, tenants::Principal, workspace::Workspaces};

/// How long after its end a sandbox is still shown.
const SHOWN_FOR: Duration = Duration::from_secs(24 * 3600);

/// How a sandbox looks, for the time when it is gone.
pub fn describe(entry: &Entry, workspaces: Option<&Workspaces>, now: Timestamp) -> Option<String> {
    let mut entry = entry.clone();
    // That it is to go is no part of how it was.
    entry.intent = entry.intent.filter(|intent| !matches!(intent.operation, Operation::Remove { .. }));
    let shown = present::complete(present::sandbox(&entry), &entry, workspaces, now);
    serde_json::to_string(&present::in_short(shown, &entry, now)).ok()
}

/// The sandboxes that this caller may see and that ended within the last day, newest end first; or one of them.
pub(super) async fn ended(
    app: &App,
    principal: &Principal,
    id: Option<SandboxId>,
) -> Result<Vec<Sandbox>, StoreError> {
    let age = i64::try_from(SHOWN_FOR.as_millis()).unwrap_or(i64::MAX);
    let since = Timestamp::clamped(app.engine.clock().now().as_millis().saturating_sub(age));
    let ended = app.engine.store().ended(since, id).await?;
    let seen = ended.into_iter().filter(|one| principal.may_see(one.owner.as_deref()));
    // A lost create can be made again under its id: what exists is no past.
    Ok(seen
        .filter(|one| app.engine.index().get(one.sandbox_id).is_none())
        .filter_map(|one| shown(&one))
        .collect())
}

/// A sandbox that failed stays `Failed` for the reason that it had; any other was terminated, for the reason of its removal.
fn shown(ended: &EndedSandbox) -> Option<Sandbox> {
    let failed = State::Failed.word();
    let (reason, message) = ended.reason.split_once(", ").unwrap_or((ended.reason.as_str(), ""));
    let read = |record: &String| serde_json::from_str::<Sandbox>(record).ok();
    let records: Vec<Sandbox> = ended.records.iter().filter_map(read).collect();
    let of_failure = records.iter().find(|record| record.status.state == failed);
    let mut sandbox = of_failure.or(records.last())?.clone();
    sandbox.progress = None;
    sandbox.agent = None;
    if sandbox.status.state == failed {
        return Some(sandbox);
    }
    let lost = Reason::RuntimeLost.word();
    if reason == lost {
        // Nobody looked when it went, so what is kept is from before.
        let message = Some(message.to_owned());
        sandbox.status = SandboxStatus {
            state: failed.to_owned(),
            reason: Some(lost.to_owned()),
            message: message.clone(),
            last_transition_at: Some(ended.at.into()),
        };
        sandbox.last_failure = Some(SandboxFailure {
            reason: lost.to_owned(),
            phase: None,
            message,
            exit_code: None,
            signal: None,
            output_tail: None,
        });
        sandbox.services = None;
        (sandbox.uptime_seconds, sandbox.seed_uptime_seconds) = (None, None);
        sandbox.seed_state = Some("FAILED".to_owned());
        return Some(sandbox);
    }
    sandbox.status = SandboxStatus {
        state: State::Terminated.word().to_owned(),
        reason: Some(reason.to_owned()),
        message: Some(message.to_owned()).filter(|message| !message.is_empty()),
        last_transition_at: Some(ended.at.into()),
    };
    sandbox.seed_state = Some("STOPPED".to_owned());
    Some(sandbox)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(state: &str, reason: &str) -> String {
        serde_json::json!({"id": "x", "status": {"state": state, "reason": reason}, "entrypoint": [],
            "createdAt": "2030-01-01T00:00:00Z", "metadata": {"a": "b"}})
        .to_string()
    }

    fn ended(records: Vec<String>) -> Sandbox {
        ended_by("user_delete", records)
    }

    fn ended_by(reason: &str, records: Vec<String>) -> Sandbox {
        let ended = EndedSandbox {
            sandbox_id: SandboxId::random(),
            at: Timestamp::clamped(1_893_456_000_000),
            reason: reason.into(),
            owner: None,
            records,
        };
        shown(&ended).unwrap()
    }

    #[test]
    fn what_failed_stays_failed_and_the_rest_was_terminated() {
        let terminated = ended(vec![record("Running", "ready")]);
        assert_eq!(terminated.status.state, "Terminated");
        assert_eq!(terminated.status.reason.as_deref(), Some("user_delete"));
        assert_eq!(terminated.status.last_transition_at.unwrap().to_string(), "2030-01-01T00:00:00Z");
        let failed = ended(vec![record("Failed", "boot_failed"), record("Running", "CONTAINER_RUNNING")]);
        assert_eq!(
            (failed.status.state.as_str(), failed.status.reason.as_deref()),
            ("Failed", Some("boot_failed"))
        );
        assert_eq!(failed.metadata["a"], "b");
        let lost = ended_by("runtime_lost, it went", vec![record("Pending", "booting")]);
        assert_eq!(
            (lost.status.state.as_str(), lost.status.reason.as_deref()),
            ("Failed", Some("runtime_lost"))
        );
        assert_eq!(lost.last_failure.unwrap().message.as_deref(), Some("it went"));
        // One that failed before its box went failed for that.
        let failed = ended_by("runtime_lost, it went", vec![record("Failed", "boot_failed")]);
        assert_eq!(failed.status.reason.as_deref(), Some("boot_failed"));
    }
}
