//! What can be told about a sandbox when something is wrong with it, as text and as the stable JSON form.
//!
//! Pure: facts come in, text goes out; who gathers the facts is not decided here.
//!
//! Invariant: no secret is printed. Values of variables and labels that look like secrets by name are masked, and the
//! facts have no place for tokens.

mod console;
mod descriptor;
mod events;
mod inspect;
mod masking;
mod since;
mod summary;

pub use console::{Console, LogFilter, Selection};
pub use descriptor::{EventScope, LogScope, UnsupportedScope, describe_events, describe_logs};
pub use events::{EventFacts, EventLine, Timeline, render as render_events};
pub use inspect::{InspectFacts, PortFacts, render as render_inspect, render_runtime};
pub use since::parse as parse_since;
pub use summary::{Section, Summary, render as render_summary};

/// Lines of logs in the JSON form.
pub const LOG_LINES: usize = 100;
/// Lines of events in the JSON form.
pub const EVENT_LINES: usize = 50;

/// A point in time as this API writes it.
fn time(at_ms: i64) -> String {
    jiff::Timestamp::from_millisecond(at_ms).map_or_else(|_| at_ms.to_string(), |at| at.to_string())
}

/// Text that stays on its line.
fn one_line(text: &str) -> String {
    text.chars().flat_map(|c| if c.is_control() { c.escape_default().collect() } else { vec![c] }).collect()
}

#[cfg(test)]
mod tests;
