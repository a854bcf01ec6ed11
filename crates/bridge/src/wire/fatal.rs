//! `POST /internal/agent/v1/fatal`: the box cannot go on. Needs token and generation, no lease.

use serde::{Deserialize, Serialize};

use super::limits::{MAX_TAIL_BYTES, MAX_TAIL_LINES};

/// What ended the box. Build it with [`FatalReport::bounded`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FatalReport {
    /// The word of a reason that a sandbox shows, where the agent knows more than that it cannot go on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    pub phase: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    pub message: String,
    /// The end of what it wrote, redacted by who made it.
    #[serde(default)]
    pub output_tail: String,
}

const MAX_REASON_BYTES: usize = 64;
const MAX_PHASE_BYTES: usize = 128;
const MAX_MESSAGE_BYTES: usize = 2 * 1024;

impl FatalReport {
    /// A report that fits its request whatever it is made of: of the output the last lines, of the rest the beginning. Control
    /// characters except line breaks and tabs become `?`, because JSON would make six bytes of each.
    pub fn bounded(
        phase: &str,
        exit_code: Option<i32>,
        signal: Option<i32>,
        message: &str,
        output: &str,
    ) -> Self {
        let start = output.len().saturating_sub(MAX_TAIL_BYTES);
        let tail = &output[output.ceil_char_boundary(start)..];
        let lines = tail.trim_end_matches('\n');
        let skipped = lines.matches('\n').count().saturating_sub(MAX_TAIL_LINES - 1);
        let from = match skipped {
            0 => 0,
            n => lines.match_indices('\n').nth(n - 1).map_or(0, |(at, _)| at + 1),
        };
        Self {
            reason: None,
            phase: beginning(phase, MAX_PHASE_BYTES),
            exit_code,
            signal,
            message: beginning(message, MAX_MESSAGE_BYTES),
            output_tail: plain(&tail[from..]),
        }
    }

    /// With a more exact reason.
    #[must_use]
    pub fn because_of(self, reason: &str) -> Self {
        Self { reason: Some(beginning(reason, MAX_REASON_BYTES)), ..self }
    }
}

fn beginning(text: &str, most: usize) -> String {
    plain(&text[..text.floor_char_boundary(most)])
}

fn plain(text: &str) -> String {
    text.chars().map(|c| if c.is_control() && !matches!(c, '\n' | '\t') { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::super::limits::MAX_FATAL_BYTES;
    use super::*;

    #[test]
    fn any_report_fits_its_request() {
        for filler in ["\u{1}", "\"", "\\", "é", "\n", "\u{10ffff}", "\u{7f}"] {
            let much = filler.repeat(100_000);
            let report = FatalReport::bounded(&much, Some(i32::MIN), Some(9), &much, &much);
            let report = report.because_of(&much);
            let written = serde_json::to_vec(&report).unwrap();
            assert!(written.len() <= MAX_FATAL_BYTES, "{filler:?} makes {} bytes", written.len());
            assert!(report.output_tail.len() <= MAX_TAIL_BYTES);
        }
    }

    #[test]
    fn the_tail_is_the_last_lines() {
        let output: String = (0..200).map(|n| format!("line {n}\n")).collect();
        let report = FatalReport::bounded("setup", Some(1), None, "setup failed", &output);
        assert_eq!(report.output_tail.lines().count(), MAX_TAIL_LINES);
        assert!(report.output_tail.starts_with("line 140\n") && report.output_tail.ends_with("line 199\n"));
        assert_eq!(FatalReport::bounded("s", None, None, "m", "a\nb").output_tail, "a\nb");
    }
}
