//! Everything on one page, as far as it could be found out.

use std::fmt::Write as _;

/// A part of the page: its text, or why there is none.
pub type Section = Result<String, String>;

/// The parts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    pub id: String,
    pub inspect: Section,
    pub events: Section,
    pub logs: Section,
    /// How many lines of logs were asked for.
    pub tail: usize,
}

/// The page. A part that failed does not keep the others from being shown.
#[must_use]
pub fn render(summary: &Summary) -> String {
    let wide = "=".repeat(72);
    let mut text = format!("{wide}\nSANDBOX DIAGNOSTICS SUMMARY\nSandbox ID: {}\n{wide}\n", summary.id);
    let logs = format!("LOGS (last {} lines)", summary.tail);
    let parts = [("INSPECT", &summary.inspect), ("EVENTS", &summary.events), (logs.as_str(), &summary.logs)];
    let narrow = "-".repeat(40);
    for (title, section) in parts {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "\n{narrow}\n{title}\n{narrow}");
        let _ = match section {
            Ok(content) => writeln!(text, "{}", content.trim_end()),
            Err(reason) => writeln!(text, "[error] {reason}"),
        };
    }
    text
}
