//! The stable JSON form, for callers that name a scope.

use sandglass_api::diagnostics::DiagnosticContent;

use super::console::{Console, LogFilter};
use super::events::{self, EventFacts};
use super::{EVENT_LINES, LOG_LINES};

/// A scope that this kind of output does not have: 400.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unsupported scope, use one of: {}", .supported.join(", "))]
pub struct UnsupportedScope {
    pub supported: &'static [&'static str],
}

impl UnsupportedScope {
    /// The code clients look at.
    pub const CODE: &'static str = "DIAGNOSTICS_SCOPE_UNSUPPORTED";
}

/// Sources of logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogScope {
    Container,
    All,
}

/// Sources of events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventScope {
    Runtime,
    All,
}

impl LogScope {
    pub fn parse(text: &str) -> Result<Self, UnsupportedScope> {
        match text.trim().to_ascii_lowercase().as_str() {
            "container" => Ok(Self::Container),
            "all" => Ok(Self::All),
            _ => Err(UnsupportedScope { supported: &["container", "all"] }),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Container => "container",
            Self::All => "all",
        }
    }
}

impl EventScope {
    pub fn parse(text: &str) -> Result<Self, UnsupportedScope> {
        match text.trim().to_ascii_lowercase().as_str() {
            "runtime" => Ok(Self::Runtime),
            "all" => Ok(Self::All),
            _ => Err(UnsupportedScope { supported: &["runtime", "all"] }),
        }
    }

    fn word(self) -> &'static str {
        match self {
            Self::Runtime => "runtime",
            Self::All => "all",
        }
    }
}

/// The last lines of the console.
#[must_use]
pub fn describe_logs(id: &str, scope: LogScope, console: Console<'_>) -> DiagnosticContent {
    let selection = console.select(LogFilter::last(LOG_LINES));
    let content = DiagnosticContent::inline(id.to_owned(), "logs", scope.word().to_owned(), selection.text);
    DiagnosticContent {
        truncated: selection.truncated,
        warnings: (scope == LogScope::All).then(|| only("the sandbox's console")),
        ..content
    }
}

/// What happened, in at most so many lines as the form allows.
#[must_use]
pub fn describe_events(facts: &EventFacts, scope: EventScope) -> DiagnosticContent {
    let timeline = events::render(facts, EVENT_LINES.saturating_sub(facts.header_lines()));
    let content =
        DiagnosticContent::inline(facts.id.clone(), "events", scope.word().to_owned(), timeline.text);
    DiagnosticContent {
        truncated: timeline.truncated,
        warnings: (scope == EventScope::All).then(|| only("the runtime's events")),
        ..content
    }
}

fn only(source: &str) -> Vec<String> {
    vec![format!("only {source} contribute to scope `all` on this backend")]
}
