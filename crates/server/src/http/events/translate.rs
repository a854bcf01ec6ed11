//! From the lines of a history to the events of the wire: the one table.
//!
//! Nothing is told that the line does not say: where the state before is not known, `from` is left out.

use sandglass_api::lifecycle::SandboxEvent;
use sandglass_sandbox::{lifecycle::state::State, ports::store::SequencedEvent};
use serde_json::{Map, Value, json};

use crate::{
    engine::{
        history::{OWNER, RECORD, REMOVED},
        provision::{GIVEN_UP, READY},
    },
    http::present_workspace::GENERATION,
};

/// After which nothing comes.
pub const TERMINATED: &str = "sandbox.terminated";
const STATE: &str = "sandbox.state_changed";
const FAILED: &str = "sandbox.failed";
const WARNING: &str = "sandbox.warning";
const PROGRESS: &str = "image.progress";

/// How the data of an event come out of the message of a line.
#[derive(Clone, Copy)]
enum Shape {
    /// The message under this name, up to the first comma.
    Value(&'static str),
    /// The message under this name, split at blanks.
    List(&'static str),
    /// The state after, the one before if it can only be one, and why; an empty reason: the message says it.
    State(Option<State>, State, &'static str),
    /// `<id> [<state> <reason>]`
    Snapshot,
    /// The line as it is.
    Line,
    /// The message is the data, as a JSON object.
    Json,
}

/// Kind of the line, type of the event, shape of its data. What is not listed is a warning.
const TABLE: &[(&str, &str, Shape)] = &[
    ("accepted", "sandbox.created", Shape::State(None, State::Pending, "ACCEPTED")),
    ("running", STATE, Shape::State(Some(State::Pending), State::Running, "CONTAINER_RUNNING")),
    ("create_failed", FAILED, Shape::State(Some(State::Pending), State::Failed, "CREATE_FAILED")),
    (READY, STATE, Shape::State(Some(State::Pending), State::Running, "ready")),
    (GIVEN_UP, FAILED, Shape::Json),
    ("pause_requested", STATE, Shape::State(Some(State::Running), State::Pausing, "PAUSING")),
    ("paused", STATE, Shape::State(Some(State::Pausing), State::Paused, "CONTAINER_PAUSED")),
    ("paused_failed", STATE, Shape::State(Some(State::Pausing), State::Running, "PAUSE_FAILED")),
    ("pause_timed_out", STATE, Shape::State(Some(State::Pausing), State::Running, "PAUSE_TIMED_OUT")),
    ("paused_outside", STATE, Shape::State(Some(State::Running), State::Paused, "CONTAINER_PAUSED")),
    ("resume_requested", STATE, Shape::State(Some(State::Paused), State::Resuming, "RESUMING")),
    ("resumed", STATE, Shape::State(Some(State::Resuming), State::Running, "CONTAINER_RUNNING")),
    ("resumed_failed", STATE, Shape::State(Some(State::Resuming), State::Paused, "RESUME_FAILED")),
    ("resume_timed_out", STATE, Shape::State(Some(State::Resuming), State::Paused, "RESUME_TIMED_OUT")),
    ("resumed_outside", STATE, Shape::State(Some(State::Paused), State::Running, "CONTAINER_RUNNING")),
    ("exited", STATE, Shape::State(None, State::Terminated, "CONTAINER_EXITED")),
    ("exited_error", FAILED, Shape::State(None, State::Failed, "CONTAINER_EXITED_ERROR")),
    ("out_of_memory", FAILED, Shape::State(None, State::Failed, "OUT_OF_MEMORY")),
    ("entrypoint_failed", FAILED, Shape::State(None, State::Failed, "ENTRYPOINT_FAILED")),
    ("supervisor_lost", FAILED, Shape::State(None, State::Failed, "SUPERVISOR_LOST")),
    ("egress_lost", FAILED, Shape::State(None, State::Failed, "EGRESS_LOST")),
    ("remove_requested", STATE, Shape::State(None, State::Stopping, "")),
    (REMOVED, TERMINATED, Shape::Value("reason")),
    ("renewed", "sandbox.expiration_changed", Shape::Value("expiresAt")),
    ("metadata_changed", "sandbox.metadata_changed", Shape::List("keys")),
    ("snapshot_started", "snapshot.started", Shape::Snapshot),
    ("snapshot_finished", "snapshot.finished", Shape::Snapshot),
    ("idle", "sandbox.idle", Shape::Json),
    ("expiring", "sandbox.expiring", Shape::Json),
    ("policy_failed", "sandbox.policy_failed", Shape::Json),
    ("pre_stop", "sandbox.pre_stop", Shape::Json),
    ("pre_stop_failed", "sandbox.pre_stop_failed", Shape::Json),
    ("egress.denied", "egress.denied", Shape::Line),
    ("egress.injected", "egress.injected", Shape::Line),
    ("egress.noted", "egress.noted", Shape::Line),
    // Written by earlier versions.
    ("pull", PROGRESS, Shape::Line),
];

/// What the runtime's own record of the box holds is told under its own words.
const OF_THE_BOX: &str = "box.";
/// Progress of an image, by phase.
const OF_THE_IMAGE: &str = "image_";

/// What agents tell, and what becomes of an image: the kinds are the types.
const AS_TOLD: [&str; 6] = ["agent.", "boot.", "service.", "activity.", "image.", "pool."];

fn row(kind: &str) -> (String, Shape) {
    if let Some((_, name, shape)) = TABLE.iter().find(|(of, ..)| *of == kind) {
        return ((*name).to_owned(), *shape);
    }
    if AS_TOLD.iter().any(|family| kind.starts_with(family)) {
        return (kind.to_owned(), Shape::Json);
    }
    if kind.starts_with(OF_THE_IMAGE) {
        return (PROGRESS.to_owned(), Shape::Line);
    }
    if kind.starts_with(OF_THE_BOX) {
        return (kind.replace('-', "_"), Shape::Line);
    }
    (WARNING.to_owned(), Shape::Line)
}

fn data(kind: &str, shape: Shape, message: &str) -> Map<String, Value> {
    if let (Shape::Json, Ok(Value::Object(told))) = (shape, serde_json::from_str(message)) {
        return told;
    }
    let mut data = Map::new();
    let mut put = |name: &str, value: Value| drop(data.insert(name.to_owned(), value));
    match shape {
        Shape::Value(name) => {
            let (value, rest) = message.split_once(", ").unwrap_or((message, ""));
            put(name, json!(value));
            if !rest.is_empty() {
                put("message", json!(rest));
            }
        }
        Shape::List(name) => put(name, json!(message.split_whitespace().collect::<Vec<_>>())),
        Shape::State(from, to, reason) => {
            if let Some(from) = from {
                put("from", json!(from.word()));
            }
            put("to", json!(to.word()));
            let said = reason.is_empty();
            put("reason", json!(if said { message } else { reason }));
            if !said && !message.is_empty() {
                put("message", json!(message));
            }
        }
        Shape::Json => put("message", json!(message)),
        Shape::Snapshot => {
            let mut words = message.split_whitespace();
            for name in ["snapshotId", "state", "reason"] {
                if let Some(word) = words.next() {
                    put(name, json!(word));
                }
            }
        }
        Shape::Line => {
            let (name, word) = match kind.strip_prefix(OF_THE_IMAGE) {
                Some(phase) => ("phase", phase),
                None => ("kind", kind.trim_start_matches(OF_THE_BOX)),
            };
            put(name, json!(word));
            put("message", json!(message));
        }
    }
    data
}

/// The event of a line; `None` for lines that are the server's own business.
pub fn event(line: &SequencedEvent) -> Option<SandboxEvent> {
    let kind = line.event.kind.as_str();
    if [OWNER, RECORD].contains(&kind) {
        return None;
    }
    let (name, shape) = row(kind);
    Some(SandboxEvent {
        seq: line.seq,
        kind: name,
        time: line.event.at.into(),
        generation: GENERATION,
        data: data(kind, shape, &line.event.message),
    })
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::{Timestamp, ports::store::EventRecord};

    use super::*;

    fn told(kind: &str, message: &str) -> String {
        let at = Timestamp::clamped(1_893_456_000_000);
        let event = EventRecord { at, kind: kind.into(), message: message.into() };
        super::event(&SequencedEvent { seq: 7, event })
            .map_or("nothing".into(), |e| format!("{} {}", e.kind, Value::Object(e.data)))
    }

    #[test]
    fn every_kind_of_line() {
        for (kind, message, expected) in [
            (
                "accepted",
                "image a",
                r#"sandbox.created {"to":"Pending","reason":"ACCEPTED","message":"image a"}"#,
            ),
            ("owner", "tenant", "nothing"),
            ("record", "{}", "nothing"),
            (
                "running",
                "the sandbox is up",
                r#"sandbox.state_changed {"from":"Pending","to":"Running","reason":"CONTAINER_RUNNING","message":"the sandbox is up"}"#,
            ),
            (
                "paused",
                "",
                r#"sandbox.state_changed {"from":"Pausing","to":"Paused","reason":"CONTAINER_PAUSED"}"#,
            ),
            (
                "remove_requested",
                "ttl_expiry",
                r#"sandbox.state_changed {"to":"Stopping","reason":"ttl_expiry"}"#,
            ),
            ("removed", "user_delete", r#"sandbox.terminated {"reason":"user_delete"}"#),
            (
                "renewed",
                "2030-01-01T00:00:00Z, because it is in use",
                r#"sandbox.expiration_changed {"expiresAt":"2030-01-01T00:00:00Z","message":"because it is in use"}"#,
            ),
            ("metadata_changed", "a b.c/d", r#"sandbox.metadata_changed {"keys":["a","b.c/d"]}"#),
            ("image_pull", "layer 1", r#"image.progress {"phase":"pull","message":"layer 1"}"#),
            (
                "snapshot_finished",
                "id Ready snapshot_runtime_ready",
                r#"snapshot.finished {"snapshotId":"id","state":"Ready","reason":"snapshot_runtime_ready"}"#,
            ),
            ("snapshot_started", "id", r#"snapshot.started {"snapshotId":"id"}"#),
            ("box.oom-kill", "m", r#"box.oom_kill {"kind":"oom-kill","message":"m"}"#),
            ("egress.denied", "m", r#"egress.denied {"kind":"egress.denied","message":"m"}"#),
            ("disk-full", "m", r#"sandbox.warning {"kind":"disk-full","message":"m"}"#),
            (
                "exited_error",
                "code 3",
                r#"sandbox.failed {"to":"Failed","reason":"CONTAINER_EXITED_ERROR","message":"code 3"}"#,
            ),
        ] {
            let seen = told(kind, message);
            let (name, data) = seen.split_once(' ').unwrap_or((seen.as_str(), "null"));
            let (wanted, object) = expected.split_once(' ').unwrap_or((expected, "null"));
            let parse = |text: &str| serde_json::from_str::<Value>(text).unwrap();
            assert_eq!((name, parse(data)), (wanted, parse(object)), "{kind}");
        }
    }

    #[test]
    fn changes_of_state_join_up() {
        let states = |kind: &str| match row(kind).1 {
            Shape::State(from, to, _) => (from, to),
            _ => panic!("{kind} changes no state"),
        };
        for way in [
            ["accepted", "running", "pause_requested", "paused", "resume_requested", "resumed"].as_slice(),
            &["accepted", "create_failed"],
            &["running", "pause_requested", "paused_failed", "pause_requested", "pause_timed_out", "exited"],
            &["paused", "resume_requested", "resumed_failed", "resume_requested", "resume_timed_out"],
            &["running", "paused_outside", "resumed_outside", "remove_requested"],
        ] {
            for pair in way.windows(2) {
                let ((_, left), (from, _)) = (states(pair[0]), states(pair[1]));
                assert!(from.is_none_or(|from| from == left), "{pair:?}");
            }
        }
    }
}
