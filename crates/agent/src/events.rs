//! The event stream's bytes: one compact JSON object and two newlines an event.
//!
//! Written by hand instead of through serde because output is the hot path: a plain line is three copies.
//! Invariant: no event holds a raw newline, U+0085, U+2028 or U+2029, and none reaches the 4 MiB at which
//! clients stop reading.

use std::time::{SystemTime, UNIX_EPOCH};

use crate::lines::char_boundary;

pub const CONTENT_TYPE: &str = "text/event-stream";

/// A line that needs escaping is cut here: six output bytes for each of these stay below 4 MiB.
const MAX_ESCAPED: usize = 640 << 10;

/// The time written into a batch of events, formatted once.
#[derive(Debug, Clone)]
pub struct Stamp(String);

impl Stamp {
    pub fn now() -> Self {
        Stamp(unix_millis().to_string())
    }

    /// Milliseconds since 1970, as events have them.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

pub fn unix_millis() -> u64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0, |d| u64::try_from(d.as_millis()).unwrap_or(u64::MAX))
}

pub fn init(out: &mut Vec<u8>, id: &str, stamp: &Stamp) {
    text_event(out, "init", id.as_bytes(), stamp);
}

pub fn ping(out: &mut Vec<u8>, stamp: &Stamp) {
    text_event(out, "ping", b"pong", stamp);
}

/// One output line; a blank one is sent as a newline because clients drop empty text.
pub fn line(out: &mut Vec<u8>, kind: &str, mut line: &[u8], stamp: &Stamp) {
    if line.is_empty() {
        return text_event(out, kind, b"\n", stamp);
    }
    if line.len() > MAX_ESCAPED && !is_plain(line) {
        while line.len() > MAX_ESCAPED {
            let (piece, rest) = line.split_at(char_boundary(&line[..MAX_ESCAPED]));
            text_event(out, kind, piece, stamp);
            line = rest;
        }
    }
    text_event(out, kind, line, stamp);
}

pub fn complete(out: &mut Vec<u8>, millis: u64, stamp: &Stamp) {
    out.extend_from_slice(br#"{"type":"execution_complete""#);
    if millis > 0 {
        out.extend_from_slice(format!(r#","execution_time":{millis}"#).as_bytes());
    }
    out.extend_from_slice(br#","timestamp":"#);
    out.extend_from_slice(stamp.0.as_bytes());
    out.extend_from_slice(b"}\n\n");
}

pub fn error(out: &mut Vec<u8>, value: &str, trace: &str, stamp: &Stamp) {
    out.extend_from_slice(br#"{"type":"error","timestamp":"#);
    error_body(out, "CommandExecError", value, trace, stamp);
}

/// An error of another name, whose text is repeated beside it.
pub fn named_error(out: &mut Vec<u8>, name: &str, value: &str, trace: &str, stamp: &Stamp) {
    out.extend_from_slice(br#"{"type":"error","text":""#);
    escape(out, trace.as_bytes());
    out.extend_from_slice(br#"","timestamp":"#);
    error_body(out, name, value, trace, stamp);
}

fn error_body(out: &mut Vec<u8>, name: &str, value: &str, trace: &str, stamp: &Stamp) {
    out.extend_from_slice(stamp.0.as_bytes());
    out.extend_from_slice(br#","error":{"ename":""#);
    escape(out, name.as_bytes());
    out.extend_from_slice(br#"","evalue":""#);
    escape(out, value.as_bytes());
    out.extend_from_slice(br#"","traceback":[""#);
    escape(out, trace.as_bytes());
    out.extend_from_slice(b"\"]}}\n\n");
}

/// An event of one text.
pub fn text_event(out: &mut Vec<u8>, kind: &str, text: &[u8], stamp: &Stamp) {
    out.reserve(text.len() + 80);
    out.extend_from_slice(br#"{"type":""#);
    out.extend_from_slice(kind.as_bytes());
    out.extend_from_slice(br#"","text":""#);
    escape(out, text);
    out.extend_from_slice(br#"","timestamp":"#);
    out.extend_from_slice(stamp.0.as_bytes());
    out.extend_from_slice(b"}\n\n");
}

/// Bytes that can be copied as they are: printable ASCII without the characters escaped below.
const PLAIN: [bool; 256] = {
    let mut table = [false; 256];
    let mut byte = 0x20;
    while byte < 0x80 {
        table[byte] = !matches!(byte as u8, b'"' | b'\\' | b'<' | b'>' | b'&');
        byte += 1;
    }
    table
};

fn is_plain(bytes: &[u8]) -> bool {
    plain_prefix(bytes) == bytes.len()
}

fn plain_prefix(bytes: &[u8]) -> usize {
    let mut at = 0;
    // Whole blocks without an early exit, so that the compiler can keep the loop branch-free.
    for block in bytes.chunks_exact(16) {
        if !block.iter().fold(true, |all, b| all & PLAIN[*b as usize]) {
            break;
        }
        at += 16;
    }
    at + bytes[at..].iter().take_while(|b| PLAIN[**b as usize]).count()
}

/// JSON string escaping as Go's encoder does it, plus U+0085; every invalid byte becomes U+FFFD.
pub fn escape(out: &mut Vec<u8>, mut bytes: &[u8]) {
    loop {
        let plain = plain_prefix(bytes);
        out.extend_from_slice(&bytes[..plain]);
        bytes = &bytes[plain..];
        let Some(&byte) = bytes.first() else { return };
        let used = if byte < 0x80 { escape_ascii(out, byte) } else { escape_wide(out, bytes) };
        bytes = &bytes[used..];
    }
}

fn escape_ascii(out: &mut Vec<u8>, byte: u8) -> usize {
    let short = match byte {
        b'"' => b'"',
        b'\\' => b'\\',
        b'\n' => b'n',
        b'\r' => b'r',
        b'\t' => b't',
        0x08 => b'b',
        0x0c => b'f',
        _ => {
            const HEX: &[u8; 16] = b"0123456789abcdef";
            out.extend_from_slice(b"\\u00");
            out.push(HEX[usize::from(byte >> 4)]);
            out.push(HEX[usize::from(byte & 15)]);
            return 1;
        }
    };
    out.extend_from_slice(&[b'\\', short]);
    1
}

fn escape_wide(out: &mut Vec<u8>, bytes: &[u8]) -> usize {
    let width = match bytes[0] {
        0xc2..=0xdf => 2,
        0xe0..=0xef => 3,
        0xf0..=0xf4 => 4,
        _ => 1,
    };
    match bytes.get(..width).filter(|sequence| width > 1 && std::str::from_utf8(sequence).is_ok()) {
        Some(b"\xc2\x85") => out.extend_from_slice(b"\\u0085"),
        Some(b"\xe2\x80\xa8") => out.extend_from_slice(b"\\u2028"),
        Some(b"\xe2\x80\xa9") => out.extend_from_slice(b"\\u2029"),
        Some(sequence) => out.extend_from_slice(sequence),
        None => {
            out.extend_from_slice(b"\\ufffd");
            return 1;
        }
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn escaped(bytes: &[u8]) -> String {
        let mut out = Vec::new();
        escape(&mut out, bytes);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn escapes_as_the_reference_encoder() {
        assert_eq!(escaped(b"a\"b\\c\td\n\x01\x08\x0c\r\x7f"), "a\\\"b\\\\c\\td\\n\\u0001\\b\\f\\r\x7f");
        assert_eq!(escaped(b"<b>&"), r"\u003cb\u003e\u0026");
        assert_eq!(escaped("x\u{85}\u{2028}\u{2029}é😀".as_bytes()), "x\\u0085\\u2028\\u2029é😀");
        assert_eq!(escaped(b"\xff\xe2\x82"), r"\ufffd\ufffd\ufffd");
    }

    #[test]
    fn an_escaped_giant_stays_below_the_clients_limit() {
        let mut out = Vec::new();
        line(&mut out, "stdout", &vec![1u8; crate::lines::MAX_LINE], &Stamp::now());
        let longest = out.split(|b| *b == b'\n').map(<[u8]>::len).max().unwrap();
        assert!(longest < 4 << 20, "{longest}");
    }

    proptest! {
        #[test]
        fn an_event_is_one_line_of_json_with_the_text_in_it(text in any::<String>()) {
            let mut out = Vec::new();
            text_event(&mut out, "stdout", text.as_bytes(), &Stamp::now());
            prop_assert!(out.ends_with(b"}\n\n"), "the frame is not closed");
            let frame = std::str::from_utf8(&out[..out.len() - 2]).unwrap();
            prop_assert!(!frame.contains(['\n', '\r', '\u{85}', '\u{2028}', '\u{2029}']), "a line break is inside");
            let value: serde_json::Value = serde_json::from_str(frame).unwrap();
            prop_assert_eq!(value["text"].as_str(), Some(text.as_str()));
        }

        #[test]
        fn any_bytes_escape_to_valid_json(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let json = format!("\"{}\"", escaped(&bytes));
            prop_assert!(serde_json::from_str::<String>(&json).is_ok());
        }
    }
}
