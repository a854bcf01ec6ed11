//! The event stream of a running command, as the in-sandbox agent sends it.
//!
//! Owns parsing only: one JSON object a line, lines usually separated by a blank one, an optional `data:` prefix.
//!
//! The protocol carries lines of text, not bytes: each line comes without its terminator (a blank line as `"\n"`), so
//! `\r` and `\r\n` become `\n`, bytes that are not UTF-8 become U+FFFD, and whether the last line of an output was
//! terminated cannot be known. We print a newline after every line. A line near the protocol's limit (4 MiB an event)
//! comes in several events that cannot be told from several lines.

use serde::Deserialize;
use thiserror::Error;

use crate::lines::{LineSplitter, LineTooLong};

/// One event that matters to a command line.
#[derive(Debug, PartialEq, Eq)]
pub enum Event {
    /// The command has an id by which it can be interrupted.
    Started(String),
    /// Bytes for standard output.
    Stdout(Vec<u8>),
    /// Bytes for standard error.
    Stderr(Vec<u8>),
    /// The command ended with exit code 0.
    Completed,
    /// The command ended otherwise, or never started.
    Failed(Failure),
    /// The agent gave up and reported an error of its own.
    Refused { code: String, message: String },
}

/// How a command failed, in the words of the agent.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Failure {
    /// An exit code, `-1` for a signal, or the reason why the command could not start.
    pub value: String,
    /// For example `signal: killed`.
    pub traceback: Vec<String>,
}

/// The stream does not follow the protocol.
#[derive(Debug, Error)]
pub enum EventError {
    #[error(transparent)]
    TooLong(#[from] LineTooLong),
    #[error("the agent sent an event that is not valid JSON")]
    Damaged(#[source] serde_json::Error),
}

/// Turns chunks into events.
#[derive(Debug, Default)]
pub struct EventParser {
    lines: LineSplitter,
}

impl EventParser {
    /// Appends received bytes.
    pub fn push(&mut self, chunk: &[u8]) -> Result<(), EventError> {
        Ok(self.lines.push(chunk)?)
    }

    /// The next event that is completely received.
    pub fn next_event(&mut self) -> Result<Option<Event>, EventError> {
        while let Some(line) = self.lines.next_line() {
            if let Some(event) = parse_line(line).map_err(EventError::Damaged)? {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }

    /// The last event when its newline is missing. A frame cut in the middle is no event.
    pub fn finish(&mut self) -> Option<Event> {
        parse_line(self.lines.finish()).ok().flatten()
    }
}

#[derive(Deserialize)]
struct Frame {
    #[serde(rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    text: Option<String>,
    error: Option<ErrorFrame>,
    code: Option<String>,
    message: Option<String>,
}

#[derive(Deserialize)]
struct ErrorFrame {
    #[serde(default)]
    evalue: Option<String>,
    #[serde(default)]
    traceback: Option<Vec<String>>,
}

fn parse_line(line: &[u8]) -> Result<Option<Event>, serde_json::Error> {
    let line = line.trim_ascii();
    let json = line.strip_prefix(b"data:").unwrap_or(line).trim_ascii_start();
    // Comments, `event:`, `id:` and `retry:` lines of a standard event stream carry nothing we need.
    if !json.starts_with(b"{") {
        return Ok(None);
    }
    let frame: Frame = serde_json::from_slice(json)?;
    Ok(match frame.kind.as_deref() {
        Some("init") => Some(Event::Started(frame.text.unwrap_or_default())),
        Some("stdout") => Some(Event::Stdout(line_of(frame.text))),
        Some("stderr") => Some(Event::Stderr(line_of(frame.text))),
        Some("execution_complete") => Some(Event::Completed),
        Some("error") => {
            let error = frame.error.unwrap_or(ErrorFrame { evalue: None, traceback: None });
            Some(Event::Failed(Failure {
                value: error.evalue.unwrap_or_default(),
                traceback: error.traceback.unwrap_or_default(),
            }))
        }
        Some(_) => None,
        None if frame.code.is_some() || frame.message.is_some() => Some(Event::Refused {
            code: frame.code.unwrap_or_default(),
            message: frame.message.unwrap_or_default(),
        }),
        None => None,
    })
}

fn line_of(text: Option<String>) -> Vec<u8> {
    let mut bytes = text.unwrap_or_default().into_bytes();
    if bytes != b"\n" {
        bytes.push(b'\n');
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, size: usize) -> Vec<Event> {
        let mut parser = EventParser::default();
        let mut events = Vec::new();
        for chunk in text.as_bytes().chunks(size) {
            parser.push(chunk).unwrap();
            while let Some(event) = parser.next_event().unwrap() {
                events.push(event);
            }
        }
        events.extend(parser.finish());
        events
    }

    fn out(text: &str) -> Event {
        Event::Stdout(text.as_bytes().to_vec())
    }

    #[test]
    fn raw_frames_split_anywhere() {
        let text = concat!(
            r#"{"type":"init","text":"abc","timestamp":1}"#,
            "\n\n",
            r#"{"type":"ping","text":"pong","timestamp":1}"#,
            "\n\n",
            r#"{"type":"stdout","text":"h\u00e9llo","timestamp":1}"#,
            "\n\n",
            r#"{"type":"stdout","text":"\n","timestamp":1}"#,
            "\n\n",
            r#"{"type":"stderr","text":"é","timestamp":1}"#,
            "\n\n",
            r#"{"type":"execution_complete","timestamp":1}"#,
            "\n\n"
        );
        let expected = [
            Event::Started("abc".into()),
            out("héllo\n"),
            out("\n"),
            Event::Stderr("é\n".as_bytes().to_vec()),
            Event::Completed,
        ];
        for size in [1, 2, 3, 7, 64, 10_000] {
            assert_eq!(parse(text, size), expected);
        }
    }

    #[test]
    fn standard_event_stream_framing_is_accepted() {
        let text = ": hello\r\nevent: x\r\nid: 4\r\ndata: {\"type\":\"stdout\",\"text\":\"a\"}\r\n\r\ndata:{\"type\":\"execution_complete\"}";
        assert_eq!(parse(text, 5), [out("a\n"), Event::Completed]);
    }

    #[test]
    fn single_newlines_between_frames_lose_nothing() {
        let text = "{\"type\":\"stdout\",\"text\":\"a\"}\n{\"type\":\"stdout\",\"text\":\"b\"}\n";
        assert_eq!(parse(text, 9), [out("a\n"), out("b\n")]);
    }

    #[test]
    fn failures_keep_value_and_traceback() {
        let text = r#"{"type":"error","error":{"ename":"CommandExecError","evalue":"-1","traceback":["signal: killed"]}}"#;
        let failure = Failure { value: "-1".into(), traceback: vec!["signal: killed".into()] };
        assert_eq!(parse(text, 4), [Event::Failed(failure)]);
        let text = r#"{"type":"error","error":{"evalue":"7","traceback":null}}"#;
        assert_eq!(parse(text, 4), [Event::Failed(Failure { value: "7".into(), traceback: vec![] })]);
    }

    #[test]
    fn a_bare_error_object_is_a_refusal_and_a_cut_frame_is_nothing() {
        let refused = Event::Refused { code: "RUNTIME_ERROR".into(), message: "no".into() };
        assert_eq!(parse(r#"{"code":"RUNTIME_ERROR","message":"no"}"#, 3), [refused]);
        assert_eq!(parse(r#"{"type":"execution_comp"#, 3), []);
    }

    #[test]
    fn damage_in_the_middle_is_an_error() {
        let mut parser = EventParser::default();
        parser.push(b"{\"type\":\"stdout\",\n\n").unwrap();
        assert!(parser.next_event().is_err());
    }

    #[test]
    fn a_four_mebibyte_line_passes() {
        let long = "y".repeat(4 << 20);
        let events = parse(&format!("{{\"type\":\"stdout\",\"text\":\"{long}\"}}\n\n"), 8192);
        assert_eq!(events, [out(&format!("{long}\n"))]);
    }
}
