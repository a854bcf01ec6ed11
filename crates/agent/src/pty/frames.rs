//! The messages of a terminal's WebSocket, both ways.

use bytes::{BufMut, Bytes, BytesMut};
use serde_json::{Value, json};
use tokio_tungstenite::tungstenite::Message;

use super::ring::Origin;

const STDIN: u8 = 0;
const STDOUT: u8 = 1;
const STDERR: u8 = 2;
const REPLAY: u8 = 3;

/// What a client asks for.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Asked {
    Input(Bytes),
    Resize {
        cols: u16,
        rows: u16,
    },
    Signal(i32),
    Ping,
    /// A type that is not known, which is told.
    Unknown(String),
    /// Nothing: empty input, other binary frames, text that is not JSON.
    Ignored,
}

impl Asked {
    pub(super) fn parse(message: Message) -> Self {
        match message {
            Message::Binary(bytes) => match bytes.first() {
                Some(&STDIN) if bytes.len() > 1 => Asked::Input(bytes.slice(1..)),
                _ => Asked::Ignored,
            },
            Message::Text(text) => match serde_json::from_str::<Value>(&text) {
                Ok(value) => Self::from_json(&value),
                Err(_) => Asked::Ignored,
            },
            _ => Asked::Ignored,
        }
    }

    fn from_json(value: &Value) -> Self {
        let size = |key: &str| value[key].as_u64().and_then(|n| u16::try_from(n).ok()).filter(|n| *n > 0);
        match value["type"].as_str().unwrap_or_default() {
            "stdin" => match value["data"].as_str() {
                Some(data) if !data.is_empty() => Asked::Input(Bytes::copy_from_slice(data.as_bytes())),
                _ => Asked::Ignored,
            },
            "resize" => match (size("cols"), size("rows")) {
                (Some(cols), Some(rows)) => Asked::Resize { cols, rows },
                _ => Asked::Ignored,
            },
            "signal" => value["signal"].as_str().and_then(number).map_or(Asked::Ignored, Asked::Signal),
            "ping" => Asked::Ping,
            other => Asked::Unknown(other.chars().take(64).collect()),
        }
    }

    /// Whether a viewer may not do it.
    pub(super) fn changes(&self) -> bool {
        matches!(self, Asked::Input(_) | Asked::Resize { .. } | Asked::Signal(_))
    }
}

fn number(name: &str) -> Option<i32> {
    Some(match name {
        "SIGINT" => libc::SIGINT,
        "SIGTERM" => libc::SIGTERM,
        "SIGKILL" => libc::SIGKILL,
        "SIGQUIT" => libc::SIGQUIT,
        "SIGHUP" => libc::SIGHUP,
        _ => return None,
    })
}

pub(super) fn output(origin: Origin, bytes: &[u8]) -> Message {
    let mut frame = BytesMut::with_capacity(1 + bytes.len());
    frame.put_u8(match origin {
        Origin::Out => STDOUT,
        Origin::Err => STDERR,
    });
    frame.put_slice(bytes);
    Message::Binary(frame.freeze())
}

pub(super) fn replay(offset: u64, bytes: &[u8]) -> Message {
    let mut frame = BytesMut::with_capacity(9 + bytes.len());
    frame.put_u8(REPLAY);
    frame.put_u64(offset);
    frame.put_slice(bytes);
    Message::Binary(frame.freeze())
}

pub(super) fn text(value: &Value) -> Message {
    Message::Text(value.to_string().into())
}

pub(super) fn error(code: &str, message: &str) -> Message {
    text(&json!({ "type": "error", "error": message, "code": code }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> Asked {
        Asked::parse(Message::Text(text.into()))
    }

    #[test]
    fn what_clients_send_is_understood() {
        let input = |text: &'static str| Asked::Input(Bytes::from_static(text.as_bytes()));
        assert_eq!(Asked::parse(Message::Binary(Bytes::from_static(b"\0ls\n"))), input("ls\n"));
        for frame in [&b""[..], b"\0", b"\x01x", b"\xff"] {
            assert_eq!(Asked::parse(Message::Binary(Bytes::copy_from_slice(frame))), Asked::Ignored);
        }
        assert_eq!(asked(r#"{"type":"stdin","data":"é"}"#), input("é"));
        assert_eq!(asked(r#"{"type":"resize","cols":120,"rows":40}"#), Asked::Resize { cols: 120, rows: 40 });
        assert_eq!(asked(r#"{"type":"signal","signal":"SIGINT"}"#), Asked::Signal(libc::SIGINT));
        assert_eq!(asked(r#"{"type":"ping"}"#), Asked::Ping);
        for ignored in [
            "nonsense",
            r#"{"type":"resize","cols":0,"rows":4}"#,
            r#"{"type":"resize","cols":70000,"rows":4}"#,
            r#"{"type":"signal","signal":"SIGSTOP"}"#,
            r#"{"type":"stdin","data":7}"#,
        ] {
            assert_eq!(asked(ignored), Asked::Ignored, "{ignored}");
        }
        assert_eq!(asked(r#"{"type":"dance"}"#), Asked::Unknown("dance".into()));
        assert_eq!(asked("[]"), Asked::Unknown(String::new()));
    }

    #[test]
    fn a_replay_carries_its_offset() {
        assert_eq!(replay(258, b"x").into_data(), &b"\x03\0\0\0\0\0\0\x01\x02x"[..]);
    }

    proptest::proptest! {
        #[test]
        fn any_text_is_a_frame_of_some_kind(text in ".{0,80}|\\{\"type\":[a-z\"0-9,:{}]{0,40}\\}") {
            asked(&text);
        }
    }
}
