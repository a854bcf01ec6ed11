//! The end of an output, as a failure report quotes it.
//!
//! Takes bytes that have passed the filter. Invariant: a rendered tail has at most [`MAX_LINES`] lines and [`MAX_BYTES`] bytes, no
//! control characters but line feeds and tabs, and so at most doubles when it is written as JSON.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

pub const MAX_LINES: usize = 60;
pub const MAX_BYTES: usize = 8 << 10;
/// What the error output has of both bounds, however much the other one says: the two are read apart, and the reason of a failure may have
/// been read before much that was written before it.
const RESERVED: usize = 3;
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
    streams: [Kept; 2],
    /// Lines so far.
    count: u64,
}

/// The lines of one output.
#[derive(Debug, Default)]
struct Kept {
    /// With their numbers among those of both.
    lines: VecDeque<(u64, Vec<u8>)>,
    held: usize,
    open: OpenLine,
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
        let kept = &mut self.streams[stream.index()];
        for piece in bytes.split_inclusive(|byte| matches!(byte, b'\n' | b'\r')) {
            match piece {
                [text @ .., b'\n'] => {
                    kept.open.write(text);
                    kept.close(self.count);
                    self.count += 1;
                }
                [text @ .., b'\r'] => {
                    kept.open.write(text);
                    kept.open.rewind = true;
                }
                text => kept.open.write(text),
            }
        }
    }

    /// What a person would read, oldest line first, without a line feed at the end.
    pub fn text(&self) -> String {
        let [out, err] = &self.streams;
        let (mut out, mut err) = (out.newest_first().peekable(), err.newest_first().peekable());
        let mut shown = Shown { lines: Vec::new(), size: 0 };
        while err.peek().is_some_and(|line| shown.take(*line, RESERVED)) {
            err.next();
        }
        loop {
            let number = |line: Option<&Numbered>| line.map(|(number, _)| *number);
            let newer = if number(out.peek()) > number(err.peek()) { &mut out } else { &mut err };
            if !newer.next().is_some_and(|line| shown.take(line, 1)) {
                break;
            }
        }
        shown.lines.sort_by_key(|(number, _)| *number);
        let lines: Vec<String> = shown.lines.into_iter().map(|(_, line)| line).collect();
        lines.join("\n").trim_matches('\n').to_owned()
    }

    /// The last line with something to read, cut to what fits a progress message.
    pub fn message(&self) -> Option<String> {
        let last = |kept: &Kept| {
            let mut lines =
                kept.newest_first().map(|(number, line)| (number, printable(line).trim().to_owned()));
            lines.find(|(_, line)| !line.is_empty())
        };
        let (_, line) = self.streams.iter().filter_map(last).max_by_key(|(number, _)| *number)?;
        Some(line.chars().take(MAX_MESSAGE).collect())
    }
}

type Numbered<'a> = (u64, &'a Vec<u8>);

/// The lines that were chosen.
struct Shown {
    lines: Vec<(u64, String)>,
    /// Bytes, with a line feed for each line.
    size: usize,
}

impl Shown {
    /// Takes a line if the bounds, or a part of them, have room for it. Of a line that is too long even alone, the end.
    fn take(&mut self, (number, line): Numbered, part: usize) -> bool {
        let room = (MAX_BYTES / part).saturating_sub(self.size);
        if self.lines.len() >= MAX_LINES / part || room == 0 {
            return false;
        }
        let line = printable(line);
        let alone = self.lines.is_empty() || line.len() > MAX_BYTES / 2;
        if line.len() > room && !alone {
            return false;
        }
        let line = last_bytes(&line, room).to_owned();
        self.size += line.len() + 1;
        self.lines.push((number, line));
        true
    }
}

impl Kept {
    /// The open line has ended.
    fn close(&mut self, number: u64) {
        self.open.rewind = false;
        let line = std::mem::take(&mut self.open.bytes);
        self.held += line.len();
        self.lines.push_back((number, line));
        while self.lines.len() > MAX_LINES || (self.held > MAX_RAW && self.lines.len() > 1) {
            self.held -= self.lines.pop_front().map_or(0, |(_, line)| line.len());
        }
    }

    fn newest_first(&self) -> impl Iterator<Item = Numbered<'_>> {
        let open = Some(&self.open.bytes).filter(|line| !line.is_empty()).map(|line| (u64::MAX, line));
        open.into_iter().chain(self.lines.iter().rev().map(|(number, line)| (*number, line)))
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

    #[test]
    fn the_error_output_is_not_lost_in_the_other_one() {
        let mut tail = Tail::default();
        tail.push(Stream::Stderr, b"the reason\n");
        for number in 0..100 {
            tail.push(Stream::Stdout, format!("{number}\n").as_bytes());
        }
        let text = tail.text();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!((lines.len(), lines[0], lines[1], lines[59]), (60, "the reason", "41", "99"));
        // Nor the other way around.
        for number in 100..200 {
            tail.push(Stream::Stderr, format!("{number}\n").as_bytes());
        }
        tail.push(Stream::Stdout, b"last\n");
        let text = tail.text();
        assert!(text.starts_with("141\n") && text.ends_with("199\nlast"), "{text}");
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
