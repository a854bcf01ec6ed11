//! The console of a sandbox: lines of `<RFC 3339> <stdout|stderr> <text>`, oldest first.

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::time::Duration;

use jiff::Timestamp;

/// Which lines are wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogFilter {
    /// At most this many, the last ones.
    pub tail: usize,
    /// Nothing from before this.
    pub since: Option<Timestamp>,
}

impl LogFilter {
    /// The last `tail` lines.
    #[must_use]
    pub fn last(tail: usize) -> Self {
        Self { tail, since: None }
    }

    /// Only what is at most this old.
    #[must_use]
    pub fn within(self, age: Duration, now: Timestamp) -> Self {
        Self { since: Some(now.saturating_sub(age).unwrap_or(Timestamp::MIN)), ..self }
    }
}

/// The bytes of a console: the file that was rotated away, if any, and the current one.
#[derive(Clone, Copy, Debug)]
pub struct Console<'a> {
    pub rotated: &'a [u8],
    pub current: &'a [u8],
}

/// The lines that passed a filter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Selection {
    /// One line each, with its time.
    pub text: String,
    /// There were more than were asked for.
    pub truncated: bool,
}

/// The words for no lines.
const NOTHING: &str = "(no logs)";

impl Console<'_> {
    /// What passes the filter, as text. Invalid UTF-8 is replaced.
    #[must_use]
    pub fn select(self, filter: LogFilter) -> Selection {
        let mut kept = VecDeque::new();
        let mut truncated = false;
        let mut newest = Timestamp::MIN;
        for raw in lines(self.rotated).chain(lines(self.current)) {
            let line = Line::parse(raw);
            // Something without a time of its own belongs to what was printed before it.
            newest = line.at.unwrap_or(newest);
            if filter.since.is_some_and(|since| newest < since) {
                continue;
            }
            kept.push_back(line);
            if kept.len() > filter.tail {
                kept.pop_front();
                truncated = true;
            }
        }
        Selection { text: render(&kept), truncated }
    }
}

struct Line<'a> {
    at: Option<Timestamp>,
    time: &'a [u8],
    text: &'a [u8],
}

impl<'a> Line<'a> {
    fn parse(raw: &'a [u8]) -> Self {
        let unknown = Self { at: None, time: b"", text: raw };
        let Some((time, rest)) = split_word(raw) else { return unknown };
        let Some((b"stdout" | b"stderr", text)) = split_word(rest) else { return unknown };
        let at = std::str::from_utf8(time).ok().and_then(|time| time.parse().ok());
        if at.is_some() { Self { at, time, text } } else { unknown }
    }
}

fn lines(bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    let empty = bytes.is_empty();
    bytes.split(|b| *b == b'\n').filter(move |_| !empty)
}

fn split_word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = bytes.iter().position(|b| *b == b' ')?;
    Some((&bytes[..space], &bytes[space + 1..]))
}

fn render(lines: &VecDeque<Line<'_>>) -> String {
    if lines.is_empty() {
        return NOTHING.to_owned();
    }
    let mut text = String::new();
    for line in lines {
        if !line.time.is_empty() {
            // Writing to a string cannot fail.
            let _ = write!(text, "{} ", String::from_utf8_lossy(line.time));
        }
        text.push_str(&String::from_utf8_lossy(line.text));
        text.push('\n');
    }
    text
}
