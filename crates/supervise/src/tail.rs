//! The end of an output, as a failure report quotes it.
//!
//! Takes bytes that have passed the filter. Invariant: a rendered tail has at most [`MAX_LINES`] lines and [`MAX_BYTES`] bytes, no
//! control characters but line feeds and tabs, and so at most doubles when it is written as JSON.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub const MAX_LINES: usize = 60;
pub const MAX_BYTES: usize = 8 << 10;
/// What may be kept before colours and the like are taken out.
const MAX_RAW: usize = 4 * MAX_BYTES;
/// Of a line that is shown as progress, in characters.
const MAX_MESSAGE: usize = 200;

/// One of the two outputs of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Stream {
    Stdout,
    Stderr,
}

impl Stream {
    fn index(self) -> usize {
        match self {
            Stream::Stdout => 0,
            Stream::Stderr => 1,
        }
    }
}

/// Collects whole lines of both outputs in the order of their ends.
#[derive(Debug, Default)]
pub struct Tail {
    lines: VecDeque<Vec<u8>>,
    held: usize,
    open: [OpenLine; 2],
}

/// A line that has not ended.
#[derive(Debug, Default)]
struct OpenLine {
    bytes: Vec<u8>,
    /// A carriage return came last: whatever follows but a line feed writes over the line, as on a terminal.
    rewind: bool,
}

impl Tail {
    pub fn push(&mut self, stream: Stream, bytes: &[u8]) {
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            let line = &mut self.open[stream.index()];
            match piece {
                [text @ .., b'\n'] => {
                    line.write(text);
                    line.rewind = false;
                    let line = std::mem::take(&mut line.bytes);
                    self.keep(line);
                }
                [text @ .., b'\r'] => {
                    line.write(text);
                    line.rewind = true;
                }
                text => line.write(text),
            }
        }
    }

    fn keep(&mut self, line: Vec<u8>) {
        self.held += line.len();
        self.lines.push_back(line);
        while self.lines.len() > MAX_LINES || (self.held > MAX_RAW && self.lines.len() > 1) {
            self.held -= self.lines.pop_front().map_or(0, |line| line.len());
        }
    }

    /// What a person would read, oldest line first, without a line feed at the end.
    pub fn text(&self) -> String {
        let open = self.open.iter().map(|line| &line.bytes).filter(|line| !line.is_empty());
        let mut kept: VecDeque<String> = VecDeque::new();
        let mut size = 0;
        for line in open.rev().chain(self.lines.iter().rev()) {
            if kept.len() == MAX_LINES {
                break;
            }
            let line = printable(line);
            let line = if kept.is_empty() { last_bytes(&line, MAX_BYTES).to_owned() } else { line };
            size += line.len() + 1;
            if size > MAX_BYTES + 1 {
                break;
            }
            kept.push_front(line);
        }
        Vec::from(kept).join("\n").trim_matches('\n').to_owned()
    }

    /// The last line with something to read, cut to what fits a progress message.
    pub fn message(&self) -> Option<String> {
        let open = self.open.iter().map(|line| &line.bytes);
        let lines = open.chain(self.lines.iter().rev()).map(|line| printable(line));
        let line = lines.map(|line| line.trim().to_owned()).find(|line| !line.is_empty())?;
        Some(line.chars().take(MAX_MESSAGE).collect())
    }
}

impl OpenLine {
    fn write(&mut self, text: &[u8]) {
        if text.is_empty() {
            return;
        }
        if std::mem::take(&mut self.rewind) {
            self.bytes.clear();
        }
        self.bytes.extend_from_slice(&text[text.len().saturating_sub(MAX_RAW)..]);
        let excess = self.bytes.len().saturating_sub(MAX_RAW);
        self.bytes.drain(..excess);
    }
}

/// Cuts any output to the bounds of a tail.
pub fn bounded(bytes: &[u8]) -> String {
    let mut tail = Tail::default();
    tail.push(Stream::Stdout, bytes);
    tail.text()
}

fn last_bytes(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// Text without terminal sequences and control characters.
fn printable(line: &[u8]) -> String {
    let text = String::from_utf8_lossy(line);
    let mut shown = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\u{1b}' => match chars.next() {
                // Parameters and then one final character.
                Some('[') => while chars.next().is_some_and(|c| !('\u{40}'..='\u{7e}').contains(&c)) {},
                // A title, up to a bell or to another escape with its backslash.
                Some(']') => {
                    while let Some(c) = chars.next() {
                        if c == '\u{7}' || (c == '\u{1b}' && chars.next_if_eq(&'\\').is_some()) {
                            break;
                        }
                    }
                }
                _ => {}
            },
            '\t' => shown.push(c),
            c if c.is_control() => {}
            c => shown.push(c),
        }
    }
    shown
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_progress_bar_is_its_last_state() {
        let mut tail = Tail::default();
        tail.push(Stream::Stdout, b"\x1b[32mfetching\x1b[0m\r\n 10 %\r 50 %\r");
        tail.push(Stream::Stderr, b"\x1b]0;title\x07warning: a\tb\n");
        assert_eq!(tail.text(), "fetching\nwarning: a\tb\n 50 %");
        assert_eq!(tail.message().as_deref(), Some("50 %"));
        tail.push(Stream::Stdout, b"done\n\n");
        assert_eq!(tail.text(), "fetching\nwarning: a\tb\ndone");
        assert_eq!(tail.message().as_deref(), Some("done"));
    }

    #[test]
    fn only_the_end_is_kept() {
        let mut tail = Tail::default();
        for number in 0..1000 {
            tail.push(Stream::Stdout, format!("{number}\n").as_bytes());
        }
        let text = tail.text();
        assert!(text.starts_with("940\n") && text.ends_with("\n999"), "{text}");
        let long = bounded("é".repeat(MAX_BYTES).as_bytes());
        assert_eq!(long.len(), MAX_BYTES);
        assert_eq!(bounded(&[b"first\n".as_slice(), &[b'x'; MAX_BYTES]].concat()).len(), MAX_BYTES);
    }

    proptest! {
        #[test]
        fn the_bounds_hold_for_any_bytes(
            pieces in proptest::collection::vec((any::<bool>(), proptest::collection::vec(any::<u8>(), 0..3000)), 0..12),
        ) {
            let mut tail = Tail::default();
            for (err, piece) in &pieces {
                tail.push(if *err { Stream::Stderr } else { Stream::Stdout }, piece);
            }
            let text = tail.text();
            prop_assert!(text.len() <= MAX_BYTES && text.split('\n').count() <= MAX_LINES);
            prop_assert!(!text.chars().any(|c| c.is_control() && c != '\n' && c != '\t'));
            prop_assert!(serde_json::to_string(&text).unwrap().len() <= 2 * MAX_BYTES + 2);
        }
    }
}
