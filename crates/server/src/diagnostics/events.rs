//! What happened to a sandbox, oldest first.

use std::fmt::Write as _;

use super::{one_line, time};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventLine {
    pub at_ms: i64,
    /// For instance `paused` or `oom-kill`.
    pub kind: String,
    pub message: String,
}

/// Where the sandbox stands, and how it came there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventFacts {
    pub id: String,
    pub status: String,
    pub created_at_ms: i64,
    pub started_at_ms: Option<i64>,
    pub finished_at_ms: Option<i64>,
    pub events: Vec<EventLine>,
}

/// Rendered events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Timeline {
    pub text: String,
    /// Older events were left out.
    pub truncated: bool,
}

impl EventFacts {
    /// Lines that are printed before the events.
    pub(super) fn header_lines(&self) -> usize {
        3 + usize::from(self.started_at_ms.is_some()) + usize::from(self.finished_at_ms.is_some())
    }
}

/// The newest `limit` events under a few lines about the sandbox.
#[must_use]
pub fn render(facts: &EventFacts, limit: usize) -> Timeline {
    let mut text = String::new();
    let mut put = |key: &str, value: &str| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{key:<12}{value}");
    };
    put("Sandbox:", &facts.id);
    put("Status:", &facts.status);
    put("Created:", &time(facts.created_at_ms));
    if let Some(at) = facts.started_at_ms {
        put("Started:", &time(at));
    }
    if let Some(at) = facts.finished_at_ms {
        put("Finished:", &time(at));
    }
    let skipped = facts.events.len().saturating_sub(limit);
    for event in &facts.events[skipped..] {
        let colon = if event.message.is_empty() { "" } else { ": " };
        let line =
            format!("[{}] {}{colon}{}", time(event.at_ms), one_line(&event.kind), one_line(&event.message));
        put("Event:", &line);
    }
    if facts.events.is_empty() {
        text.push_str("(no notable events)\n");
    }
    Timeline { text, truncated: skipped > 0 }
}
