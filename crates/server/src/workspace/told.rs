//! From what an agent tells to facts and to lines of history.
//!
//! Pure. Nothing of an agent's is believed beyond what it may say: it chooses among the kinds of lines that are listed here, in bounded
//! number and length, so that no box can end a history or fill the store.

use std::time::Duration;

use sandglass_bridge::wire::{Event, FatalReport, GAP};
use sandglass_sandbox::{
    Timestamp,
    lifecycle::boot::{Failure, Link, Phase, Reason},
    ports::store::EventRecord,
};
use sandglass_supervise::{
    report::{self, Event as Report, ServiceChange},
    service::state::State as ServiceState,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{HostKey, desk::Kept};

/// Lines that an agent may cause before only changes of state are written.
const MOST_LINES: u64 = 2_000;
/// And before nothing is written any more, while the facts still follow.
const MOST_STATE_LINES: u64 = 10_000;
/// Bytes of one line's data.
const MOST_BYTES: usize = 32 << 10;
/// Progress lines of a boot are at least this far apart.
const PROGRESS_PAUSE: Duration = Duration::from_secs(1);
/// An SSH server tells by what it is known.
const HOST_KEY: &str = "service.host_key";
/// Services that are followed.
const MOST_SERVICES: usize = 64;

/// The kind of the events that tell what became of a service.
pub(super) const SERVICE_CHANGED: &str = "service.state_changed";

/// Takes an event in. Returns its line, if it has one. `redact` takes secrets out of text.
pub(super) fn event(
    kept: &mut Kept,
    event: &Event,
    now: Timestamp,
    redact: &dyn Fn(&str) -> String,
) -> Option<EventRecord> {
    let data = redact(event.data.get());
    if event.kind == GAP {
        return line(kept, now, "agent.gap", &data, true);
    }
    if event.kind == HOST_KEY {
        return host_key(kept, &data).and_then(|()| line(kept, now, HOST_KEY, &data, true));
    }
    let known = format!(r#"{{"type":{},"data":{data}}}"#, Value::from(event.kind.as_str()));
    let Ok(report) = serde_json::from_str::<Report>(&known) else {
        let kind = event.kind.as_str();
        // What else looks like a word of the server's is not taken from a box.
        return match kind {
            "activity.started" | "activity.ended" => line(kept, now, kind, &data, false),
            // Output goes the way of logs.
            "service.output" => None,
            _ => {
                let told = json!({"type": kind.chars().take(64).collect::<String>()});
                line(kept, now, "agent.event", &told.to_string(), false)
            }
        };
    };
    let important = take(kept, &report, now);
    if let Report::PhaseProgress { .. } = report {
        // Many a program says something all the time.
        let last = kept.facts.phase.as_ref().and_then(|phase| phase.told_at);
        if last.is_some_and(|last| last.until(now) < PROGRESS_PAUSE) {
            return None;
        }
        if let Some(phase) = &mut kept.facts.phase {
            phase.told_at = Some(now);
        }
    }
    line(kept, now, &event.kind, &data, important)
}

/// The service that an event tells of.
pub(super) fn service_of(event: &Event) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        name: String,
    }
    let named = (event.kind == SERVICE_CHANGED).then(|| serde_json::from_str::<Named>(event.data.get()));
    named?.ok().map(|named| named.name)
}

/// What an SSH server says it is known by. Not text for people, so it is taken only as it has to look.
fn host_key(kept: &mut Kept, data: &str) -> Option<()> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Told {
        name: String,
        host_key: HostKey,
    }
    let Told { name, host_key } = serde_json::from_str(data).ok()?;
    let plain =
        |text: &str, most: usize| text.len() <= most && text.bytes().all(|b| matches!(b, b' '..=b'~'));
    let proper = plain(&name, 63)
        && plain(&host_key.public_key, 1024)
        && plain(&host_key.fingerprint, 128)
        && host_key.fingerprint.starts_with("SHA256:");
    let room = kept.host_keys.contains_key(&name) || kept.host_keys.len() < MOST_SERVICES;
    (proper && room).then(|| kept.host_keys.insert(name, host_key)).map(drop)
}

/// What a report makes of the facts. Returns whether it changes what is shown as state.
fn take(kept: &mut Kept, report: &Report, now: Timestamp) -> bool {
    let facts = &mut kept.facts;
    match report {
        Report::PhaseStarted { step, limits } => {
            facts.phase = Some(Phase {
                name: step.phase.name().to_owned(),
                step: step.step.clone(),
                started_at: now,
                timeout_seconds: limits.timeout_seconds,
                deadline_at: now.checked_add(Duration::from_secs(limits.timeout_seconds)),
                message: None,
                told_at: None,
            });
            facts.since = now;
            true
        }
        Report::PhaseProgress { message, .. } => {
            if let Some(phase) = &mut facts.phase {
                phase.deadline_at = now.checked_add(Duration::from_secs(phase.timeout_seconds));
                phase.message = Some(message.chars().take(512).collect());
            }
            false
        }
        Report::PhaseFinished { .. } => true,
        Report::BootWarning(failure) => {
            facts.passed_over = Some(failed(failure));
            true
        }
        Report::BootCompleted { warnings } => {
            facts.phase = None;
            facts.warnings = *warnings;
            if facts.ready_at.is_none() {
                facts.ready_at = Some(now);
                facts.since = now;
            }
            true
        }
        Report::BootFailed(failure) | Report::RequiredServiceFailed(failure) => {
            facts.failure.get_or_insert_with(|| failed(failure));
            true
        }
        Report::BootCancelled { .. } => true,
        Report::ServiceChanged(change) => {
            let known = kept.services.contains_key(&change.name) || kept.services.len() < MOST_SERVICES;
            if !known {
                return false;
            }
            let facts = &mut kept.facts;
            let was = facts.failed_services.contains(&change.name);
            let is = change.to == ServiceState::Failed && !change.required;
            if was != is {
                facts.since = now;
                facts.failed_services.retain(|name| *name != change.name);
                if is {
                    facts.failed_services.push(change.name.clone());
                }
            }
            // A clock in a box may be ahead; nothing was started in the future.
            let started_at = change.started_at.map(|at| at.min(now));
            kept.services.insert(change.name.clone(), ServiceChange { started_at, ..change.clone() });
            true
        }
    }
}

fn failed(failure: &report::Failure) -> Failure {
    let reason = match failure.reason {
        report::Reason::BootFailed => Reason::BootFailed,
        report::Reason::BootTimeout => Reason::BootTimeout,
        report::Reason::ServiceFailed => Reason::ServiceFailed,
    };
    // A more exact word, where it is one of ours.
    let cause = failure.cause.as_ref().and_then(|word| serde_json::from_value(json!(word)).ok());
    let phase = match &failure.step.step {
        Some(step) => format!("{} of {step}", failure.step.phase),
        None => failure.step.phase.to_string(),
    };
    Failure {
        reason: cause.unwrap_or(reason),
        phase: Some(phase),
        message: failure.message.chars().take(2048).collect(),
        exit_code: failure.exit_code,
        signal: failure.signal,
        output_tail: end(&failure.output_tail, 8 << 10),
    }
}

/// A fatal report came, which needs no lease. What failed already stays as it is: the first word says most.
pub(super) fn fatal(
    kept: &mut Kept,
    report: &FatalReport,
    now: Timestamp,
    redact: &dyn Fn(&str) -> String,
) -> Vec<EventRecord> {
    let usual = if kept.facts.ready_at.is_some() { Reason::ServiceFailed } else { Reason::BootFailed };
    let exact = report.reason.as_ref().and_then(|word| serde_json::from_value(json!(word)).ok());
    let reason = exact.unwrap_or(usual);
    let failure = Failure {
        phase: Some(report.phase.clone()).filter(|phase| !phase.is_empty()),
        exit_code: report.exit_code,
        signal: report.signal,
        output_tail: redact(&end(&report.output_tail, 8 << 10)),
        ..Failure::new(reason, redact(&report.message))
    };
    let data = serde_json::to_string(&failure).unwrap_or_default();
    kept.facts.failure.get_or_insert(failure);
    line(kept, now, "agent.fatal", &data, true).into_iter().collect()
}

/// The agent is attached, or was heard again.
pub(super) fn attached(kept: &mut Kept, data: &Value, now: Timestamp) -> Vec<EventRecord> {
    if kept.facts.link != Link::Attached {
        kept.facts.link = Link::Attached;
        kept.facts.since = now;
    }
    line(kept, now, "agent.attached", &data.to_string(), true).into_iter().collect()
}

/// Nothing was heard for longer than the lease lasts.
pub(super) fn expired(kept: &mut Kept, now: Timestamp) -> Vec<EventRecord> {
    kept.facts.link = Link::Unresponsive;
    kept.facts.since = now;
    line(kept, now, "agent.lease_expired", "{}", true).into_iter().collect()
}

fn line(kept: &mut Kept, at: Timestamp, kind: &str, data: &str, important: bool) -> Option<EventRecord> {
    let most = if important { MOST_STATE_LINES } else { MOST_LINES };
    if kept.lines >= most {
        return None;
    }
    kept.lines += 1;
    let message = if data.len() <= MOST_BYTES { data } else { "{}" };
    Some(EventRecord { at, kind: kind.to_owned(), message: message.to_owned() })
}

/// The last bytes of a text, from a character's beginning.
fn end(text: &str, most: usize) -> String {
    text[text.ceil_char_boundary(text.len().saturating_sub(most))..].to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    fn now() -> Timestamp {
        Timestamp::clamped(1_000_000)
    }

    fn tell(kept: &mut Kept, kind: &str, data: &Value) -> Option<(String, Value)> {
        let event = Event {
            seq: 1,
            time: jiff::Timestamp::UNIX_EPOCH,
            kind: kind.into(),
            data: RawValue::from_string(data.to_string()).unwrap(),
        };
        let redact = |text: &str| text.replace("hunter2", "***");
        super::event(kept, &event, now(), &redact)
            .map(|line| (line.kind, serde_json::from_str(&line.message).unwrap()))
    }

    #[test]
    fn a_boot_as_it_is_told() {
        let mut kept = Kept::fresh(Timestamp::clamped(1));
        let started = json!({"phase": "setup", "step": "web", "timeoutSeconds": 300});
        assert_eq!(
            tell(&mut kept, "boot.phase_started", &started),
            Some(("boot.phase_started".into(), started))
        );
        let phase = kept.facts.phase.clone().unwrap();
        assert_eq!((phase.name.as_str(), phase.step.as_deref()), ("setup", Some("web")));
        assert_eq!(phase.deadline_at, Some(Timestamp::clamped(1_300_000)));
        let progress = json!({"phase": "setup", "step": "web", "message": "npm ci hunter2"});
        let (_, told) = tell(&mut kept, "boot.phase_progress", &progress).unwrap();
        assert_eq!(told["message"], "npm ci ***");
        assert_eq!(tell(&mut kept, "boot.phase_progress", &progress), None, "not more than a line a second");
        tell(&mut kept, "boot.completed", &json!({"warnings": 1})).unwrap();
        assert_eq!((kept.facts.ready_at, kept.facts.warnings), (Some(now()), 1));
        assert!(kept.facts.complaint().is_some() && kept.facts.phase.is_none());
    }

    #[test]
    fn a_failure_keeps_its_phase_code_and_tail() {
        let mut kept = Kept::fresh(now());
        let failed = json!({"reason": "boot_timeout", "phase": "setup", "step": "web", "exitCode": 3,
            "message": "silent", "outputTail": "last hunter2 words"});
        tell(&mut kept, "boot.failed", &failed).unwrap();
        let failure = kept.facts.failure.clone().unwrap();
        assert_eq!((failure.reason, failure.exit_code), (Reason::BootTimeout, Some(3)));
        assert_eq!(
            (failure.phase.as_deref(), failure.output_tail.as_str()),
            (Some("setup of web"), "last *** words")
        );
        let report = FatalReport::bounded("setup", Some(1), None, "later", "");
        assert_eq!(fatal(&mut kept, &report, now(), &str::to_owned).len(), 1);
        assert_eq!(kept.facts.failure, Some(failure), "the first word counts");
        let mut early = Kept::fresh(now());
        super::fatal(&mut early, &report.clone().because_of("boot_timeout"), now(), &str::to_owned);
        super::fatal(&mut kept, &report.because_of("no such word"), now(), &str::to_owned);
        assert_eq!(early.facts.failure.unwrap().reason, Reason::BootTimeout);
        let mut cause = Kept::fresh(now());
        let sync = json!({"reason": "boot_failed", "cause": "repository_auth_failed", "phase": "sync",
            "message": "m", "outputTail": ""});
        tell(&mut cause, "boot.failed", &sync).unwrap();
        assert_eq!(cause.facts.failure.unwrap().reason, Reason::RepositoryAuthFailed);
    }

    #[test]
    fn an_optional_service_that_is_given_up_and_comes_back() {
        let mut kept = Kept::fresh(now());
        let change = |from: &str, to: &str| json!({"name": "app", "kind": "custom", "from": from, "to": to, "required": false, "restartCount": 5});
        tell(&mut kept, "service.state_changed", &change("Starting", "Failed")).unwrap();
        assert_eq!(kept.facts.failed_services, ["app"]);
        tell(&mut kept, "service.state_changed", &change("Failed", "Starting")).unwrap();
        assert!(kept.facts.failed_services.is_empty());
        assert_eq!(kept.services["app"].restart_count, 5);
    }

    #[test]
    fn a_start_is_kept_as_it_is_told_and_is_never_in_the_future() {
        let mut kept = Kept::fresh(now());
        let change = |to: &str, started: &str| {
            let mut change = json!({"name": "app", "kind": "custom", "from": "Starting", "to": to, "required": false,
                "restartCount": 0, "lastExit": {"signal": 9}});
            if !started.is_empty() {
                change["startedAt"] = json!(started);
            }
            change
        };
        tell(&mut kept, "service.state_changed", &change("Starting", "")).unwrap();
        assert_eq!(kept.services["app"].started_at, None);
        tell(&mut kept, "service.state_changed", &change("Ready", "1970-01-01T00:16:39Z")).unwrap();
        assert_eq!(kept.services["app"].started_at, Some(Timestamp::clamped(999_000)));
        let stored = serde_json::to_value(&kept).unwrap();
        let read: Kept = serde_json::from_value(stored).unwrap();
        assert_eq!(read.services, kept.services);
        tell(&mut kept, "service.state_changed", &change("Ready", "2030-01-01T00:00:00Z")).unwrap();
        assert_eq!(kept.services["app"].started_at, Some(now()));
    }

    #[test]
    fn a_host_key_is_kept_as_it_has_to_look() {
        let mut kept = Kept::fresh(now());
        let told = |fingerprint: &str| json!({"name": "ssh", "hostKey": {"fingerprint": fingerprint, "publicKey": "ssh-ed25519 AAAA"}});
        assert!(tell(&mut kept, HOST_KEY, &told("MD5:1")).is_none());
        assert!(tell(&mut kept, HOST_KEY, &told("SHA256:\n")).is_none() && kept.host_keys.is_empty());
        assert_eq!(tell(&mut kept, HOST_KEY, &told("SHA256:x")).unwrap().0, HOST_KEY);
        assert_eq!(kept.host_keys["ssh"].public_key, "ssh-ed25519 AAAA");
    }

    #[test]
    fn no_agent_writes_lines_that_are_the_servers() {
        let mut kept = Kept::fresh(now());
        for kind in [
            "removed",
            "owner",
            "given_up",
            "sandbox.terminated",
            "snapshot.finished",
            "activity.x",
            "x",
            "service.output",
        ] {
            let told = tell(&mut kept, kind, &json!({}));
            assert!(told.is_none_or(|(kind, _)| kind == "agent.event"), "{kind}");
        }
        assert_eq!(tell(&mut kept, "activity.started", &json!({})).unwrap().0, "activity.started");
        kept.lines = MOST_LINES;
        assert_eq!(tell(&mut kept, "activity.started", &json!({})), None);
        assert!(tell(&mut kept, "boot.completed", &json!({"warnings": 0})).is_some());
        kept.lines = MOST_STATE_LINES;
        assert_eq!(
            tell(
                &mut kept,
                "boot.failed",
                &json!({"reason": "boot_failed", "phase": "start",
            "message": "m", "outputTail": ""})
            ),
            None
        );
        assert!(kept.facts.failure.is_some(), "facts follow all the same");
    }
}
