//! From what a server tells of a starting sandbox to the lines that a person reads: each stage with its time.
//!
//! Pure. Stages come from looks at the sandbox, the phases of the boot from its events, which know their own durations.

use std::time::{Duration, Instant};

use serde_json::Value;

use super::progress::took;
use crate::client::Sandbox;

/// Width of the column with the names of stages.
const NAMES: usize = 11;

/// What was seen so far.
#[derive(Debug)]
pub struct Journal {
    begun: Instant,
    /// What is under way, and since when.
    stage: Option<(&'static str, Instant)>,
    /// A build was waited for.
    built: bool,
    /// Phases of the boot were told by events, so the look need not.
    phases: bool,
    /// The end of the boot was told as well.
    completed: bool,
}

impl Journal {
    pub fn new(now: Instant) -> Self {
        Self { begun: now, stage: None, built: false, phases: false, completed: false }
    }

    /// Since the beginning.
    pub fn elapsed(&self, now: Instant) -> Duration {
        now.duration_since(self.begun)
    }

    /// Takes a look at the sandbox in; returns a line when a stage is over.
    pub fn look(&mut self, sandbox: &Sandbox, now: Instant) -> Option<String> {
        let next = if sandbox.state() == "Pending" { stage(sandbox.reason()) } else { None };
        let last = self.stage;
        if last.map(|(name, _)| name) == next {
            return None;
        }
        self.stage = next.map(|name| (name, now));
        self.built |= matches!(next, Some("queue" | "build"));
        let (name, since) = last?;
        // Its phases have lines of their own.
        if name == "boot" && self.phases {
            return None;
        }
        // One that failed is told with its reason.
        (!sandbox.is_over()).then(|| line(name, &took(now.duration_since(since))))
    }

    /// Takes an event in; returns its lines.
    pub fn event(&mut self, kind: &str, data: &Value, now: Instant) -> Vec<String> {
        let mut lines = Vec::new();
        if kind == "image.resolved" {
            // What led to it is over, whenever that is looked at next. What comes after it may have been seen already.
            let before = self.stage.take_if(|(name, _)| matches!(*name, "resolve" | "queue" | "build"));
            lines.extend(before.map(|(name, since)| line(name, &took(now.duration_since(since)))));
        }
        lines.extend(self.line_of(kind, data));
        lines
    }

    fn line_of(&mut self, kind: &str, data: &Value) -> Option<String> {
        let text = |name: &str| data.get(name).and_then(Value::as_str).unwrap_or_default();
        match kind {
            "image.resolved" => {
                let word = if self.built { "built" } else { "cached" };
                let word = if text("imageId").is_empty() { "as it is, nothing was built" } else { word };
                Some(line("image", &[word, text("imageId")].join(" ")))
            }
            "boot.phase_started" => {
                self.phases = true;
                None
            }
            "boot.phase_finished" => {
                let duration = data.get("durationMs").and_then(Value::as_u64).unwrap_or_default();
                let told = match text("outcome") {
                    "done" => took(Duration::from_millis(duration)),
                    "skipped" => return None,
                    outcome => format!("{} {outcome}", took(Duration::from_millis(duration))),
                };
                Some(line(&phase(data), &told))
            }
            "boot.completed" => {
                self.completed = true;
                None
            }
            "boot.warning" => Some(line("warning", &format!("{}: {}", phase(data), text("message")))),
            "service.state_changed" if matches!(text("to"), "Ready" | "Failed") => {
                let state = text("to").to_lowercase();
                Some(line("service", &format!("{} {state}", text("name"))))
            }
            _ => None,
        }
    }

    /// Whether everything that events tell of the boot has been told.
    pub fn is_complete(&self, sandbox: &Sandbox) -> bool {
        self.completed || sandbox.state() != "Running"
    }

    /// What is under way, for the line below.
    pub fn doing(&self, sandbox: &Sandbox, now: Instant) -> String {
        let text = |pointer: &str| sandbox.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
        let stage = self.stage.map_or("starting", |(name, _)| name);
        let name = match text("/progress/phase") {
            "" => stage,
            phase => phase,
        };
        let message = match text("/progress/message") {
            "" => sandbox.message(),
            message => message,
        };
        let time = took(self.elapsed(now));
        if message.is_empty() { format!("{name} ({time})") } else { format!("{name} ({time}): {message}") }
    }
}

/// What a reason of `Pending` is called here; `None` for what is over at once.
fn stage(reason: &str) -> Option<&'static str> {
    Some(match reason {
        "image_resolving" => "resolve",
        "image_build_queued" => "queue",
        "image_building" => "build",
        "image_pulling" | "PREPARING_IMAGE" => "pull",
        "container_creating" => "create",
        "agent_connecting" => "connect",
        "booting" => "boot",
        _ => return None,
    })
}

fn phase(data: &Value) -> String {
    let text = |name: &str| data.get(name).and_then(Value::as_str).unwrap_or_default();
    match text("step") {
        "" => text("phase").to_owned(),
        step => format!("{} {step}", text("phase")),
    }
}

/// A line of the journal.
pub fn line(name: &str, what: &str) -> String {
    format!("  {name:NAMES$} {what}")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn looked(state: &str, reason: &str) -> Sandbox {
        Sandbox(json!({ "id": "i", "status": { "state": state, "reason": reason } }))
    }

    #[test]
    fn every_stage_has_its_time() {
        let begun = Instant::now();
        let at = |ms: u64| begun + Duration::from_millis(ms);
        let mut journal = Journal::new(begun);
        let mut told = Vec::new();
        for (ms, state, reason) in [
            (0, "Pending", "accepted"),
            (10, "Pending", "image_resolving"),
            (510, "Pending", "image_building"),
            (900, "Pending", "image_building"),
            (2_510, "Pending", "container_creating"),
            (2_610, "Pending", "booting"),
        ] {
            told.extend(journal.look(&looked(state, reason), at(ms)));
        }
        assert_eq!(told, ["  resolve     0.50s", "  build       2.00s", "  create      0.10s"]);
        journal.event("boot.phase_started", &json!({ "phase": "sync" }), begun);
        let finished = json!({ "phase": "setup", "step": "install", "outcome": "done", "durationMs": 1200 });
        assert_eq!(journal.event("boot.phase_finished", &finished, begun), ["  setup install 1.20s"]);
        let mut late = Journal::new(begun);
        late.look(&looked("Pending", "container_creating"), at(0));
        let lines = late.event("image.resolved", &json!({ "imageId": "i" }), at(5));
        assert_eq!(lines, ["  image       cached i"]);
        let skipped = json!({ "phase": "setup", "outcome": "skipped", "durationMs": 0 });
        assert_eq!(journal.event("boot.phase_finished", &skipped, begun), Vec::<String>::new());
        let warned = json!({ "phase": "start", "outcome": "warned", "durationMs": 50 });
        assert_eq!(journal.event("boot.phase_finished", &warned, begun), ["  start       0.05s warned"]);
        assert_eq!(journal.look(&looked("Running", "ready"), at(5_000)), None, "the phases said it");
    }

    #[test]
    fn without_events_the_boot_is_one_stage() {
        let begun = Instant::now();
        let mut journal = Journal::new(begun);
        journal.look(&looked("Pending", "booting"), begun);
        let line = journal.look(&looked("Running", "ready"), begun + Duration::from_secs(1));
        assert_eq!(line.unwrap(), "  boot        1.00s");
    }

    #[test]
    fn images_are_cached_built_or_taken_as_they_are() {
        let now = Instant::now();
        let mut journal = Journal::new(now);
        let resolved = json!({ "imageId": "i1", "imageBuildId": "b" });
        assert_eq!(journal.event("image.resolved", &resolved, now), ["  image       cached i1"]);
        let bare = journal.event("image.resolved", &json!({ "imageId": null }), now);
        assert!(bare[0].contains("nothing was built"));
        journal.look(&looked("Pending", "image_building"), now);
        let later = now + Duration::from_secs(2);
        assert_eq!(
            journal.event("image.resolved", &resolved, later),
            ["  build       2.00s", "  image       built i1"]
        );
        assert_eq!(journal.look(&looked("Pending", "container_creating"), later), None);
    }
}
