//! What the client prints: aligned tables for people, JSON for programs.
//!
//! Invariant: text that came from a server or a sandbox never reaches a terminal with its control characters.

use std::{
    borrow::Cow,
    io::{self, IsTerminal, Write},
};

use anyhow::Result;
use clap::ValueEnum;
use serde::Serialize;
use thiserror::Error;

/// How results are printed.
#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Format {
    /// Aligned columns.
    #[default]
    Table,
    /// JSON, as the server sent it.
    Json,
}

/// The reader of our output is gone; there is nobody to tell, so this ends the program silently.
#[derive(Debug, Error)]
#[error("standard output was closed")]
pub struct OutputClosed;

/// Exit code of a program that a closed pipe ended, as a shell reports it.
pub const CLOSED_PIPE: u8 = 141;

/// Prints results to standard output.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    pub format: Format,
    color: bool,
}

impl Output {
    /// `no_color` is the flag; the variable `NO_COLOR` and output that is no terminal have the same effect.
    pub fn new(format: Format, no_color: bool) -> Self {
        let color = !no_color && !no_color_variable() && io::stdout().is_terminal();
        Self { format, color }
    }

    /// Whether JSON was asked for.
    pub fn is_json(self) -> bool {
        self.format == Format::Json
    }

    /// Prints one JSON document.
    pub fn json(self, value: &impl Serialize) -> Result<()> {
        let mut text = serde_json::to_string_pretty(value)?;
        text.push('\n');
        print(text.as_bytes())
    }

    /// Prints one line of text.
    pub fn line(self, text: &str) -> Result<()> {
        print(format!("{}\n", plain(text)).as_bytes())
    }

    /// Prints text of several lines; adds the last newline if it is missing.
    pub fn text(self, text: &str) -> Result<()> {
        let clean: String = text.lines().flat_map(|line| [plain(line), Cow::Borrowed("\n")]).collect();
        print(clean.as_bytes())
    }

    /// Prints a table; the column named `STATE` is coloured by its meaning.
    pub fn table(self, header: &[&str], rows: &[Vec<String>]) -> Result<()> {
        print(render(header, rows, self.color).as_bytes())
    }

    /// Prints `Key:  value` lines with aligned values.
    pub fn fields(self, fields: &[(&str, String)]) -> Result<()> {
        let width = fields.iter().map(|(name, _)| name.len()).max().unwrap_or(0) + 2;
        let mut text = String::new();
        for (name, value) in fields {
            text.push_str(&format!("{:width$}{}\n", format!("{name}:"), plain(value)));
        }
        print(text.as_bytes())
    }
}

/// Whether the environment asks for no colour.
pub fn no_color_variable() -> bool {
    std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty())
}

/// Writes to standard output; a closed pipe becomes [`OutputClosed`].
pub fn print(bytes: &[u8]) -> Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(OutputClosed.into()),
        other => Ok(other?),
    }
}

/// Writes a remark to standard error; there is nowhere to report that this failed.
pub fn note(text: &str) {
    let _ = writeln!(io::stderr().lock(), "{}", plain(text));
}

/// Replaces control characters, which a terminal would obey.
pub fn plain(text: &str) -> Cow<'_, str> {
    let hostile = |c: char| {
        (c.is_control() && c != '\t') || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
    };
    if text.contains(hostile) {
        Cow::Owned(text.chars().map(|c| if hostile(c) { '\u{fffd}' } else { c }).collect())
    } else {
        Cow::Borrowed(text)
    }
}

/// At most `width` characters, with an ellipsis when something was cut.
pub fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    text.chars().take(width.saturating_sub(1)).chain(['…']).collect()
}

fn render(header: &[&str], rows: &[Vec<String>], color: bool) -> String {
    let clean: Vec<Vec<Cow<'_, str>>> =
        rows.iter().map(|row| row.iter().map(|cell| plain(cell)).collect()).collect();
    let mut widths: Vec<usize> = header.iter().map(|name| name.len()).collect();
    for row in &clean {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    let head: Vec<Cow<'_, str>> = header.iter().map(|name| Cow::Borrowed(*name)).collect();
    for (index, row) in std::iter::once(&head).chain(&clean).enumerate() {
        for (column, cell) in row.iter().enumerate() {
            let style =
                (color && index > 0 && header[column] == "STATE").then(|| state_style(cell)).flatten();
            let pad = widths[column] - cell.chars().count();
            let last = column + 1 == row.len();
            match style {
                Some(style) => text.push_str(&format!("\x1b[{style}m{cell}\x1b[0m")),
                None => text.push_str(cell),
            }
            text.extend(std::iter::repeat_n(' ', if last { 0 } else { pad + 2 }));
        }
        text.push('\n');
    }
    text
}

fn state_style(state: &str) -> Option<&'static str> {
    match state {
        "Running" | "ok" => Some("32"),
        "Failed" | "missing" => Some("31"),
        "Paused" | "Pausing" | "Pending" | "Resuming" | "Stopping" | "optional" => Some("33"),
        _ => None,
    }
}

/// An instant relative to now, in words; the text itself when it is no instant.
pub fn relative(instant: &str, now: jiff::Timestamp) -> String {
    let Ok(at) = instant.parse::<jiff::Timestamp>() else { return instant.to_owned() };
    let seconds = at.as_second() - now.as_second();
    let amount = match seconds.unsigned_abs() {
        n @ 0..=119 => format!("{n}s"),
        n @ 120..=7_199 => format!("{}m", n / 60),
        n @ 7_200..=172_799 => format!("{}h", n / 3_600),
        n => format!("{}d", n / 86_400),
    };
    if seconds > 0 { format!("in {amount}") } else { format!("{amount} ago") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_escapes_are_defused() {
        let rows = vec![vec!["a".into(), "Running".into()], vec!["long\x1b[2J".into(), "é".into()]];
        let text = render(&["ID", "STATE"], &rows, false);
        assert_eq!(text, "ID        STATE\na         Running\nlong\u{fffd}[2J  é\n");
        assert!(render(&["ID", "STATE"], &rows, true).contains("\x1b[32mRunning\x1b[0m\n"));
    }

    #[test]
    fn instants_are_told_relative_to_now() {
        let now: jiff::Timestamp = "2030-01-01T00:00:00Z".parse().unwrap();
        assert_eq!(relative("2030-01-01T00:10:00.500000Z", now), "in 10m");
        assert_eq!(relative("2029-12-31T23:59:30Z", now), "30s ago");
        assert_eq!(relative("whenever", now), "whenever");
    }

    #[test]
    fn long_text_is_cut_by_characters() {
        assert_eq!(shortened("äöüß", 4), "äöüß");
        assert_eq!(shortened("äöüßx", 4), "äöü…");
    }
}
