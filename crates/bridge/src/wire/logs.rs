//! `POST /internal/agent/v1/logs`

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogsRequest {
    pub frames: Vec<LogFrame>,
}

/// Consecutive bytes of one log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LogFrame {
    /// What wrote it: a service, a phase, `entrypoint`.
    pub source: String,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// Where in the log the bytes begin. A jump says how many were lost in between.
    pub offset: u64,
    #[serde(flatten)]
    pub data: LogBytes,
}

/// Bytes as text where they are text, as base64 where not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Written", into = "Written")]
pub struct LogBytes(pub Vec<u8>);

#[derive(Serialize, Deserialize)]
struct Written {
    data: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encoding: Option<String>,
}

/// Up to where the server has each log that was sent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct LogsReply {
    pub acked: Vec<AckedLog>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct AckedLog {
    pub source: String,
    pub stream: String,
    /// The next byte that is expected.
    pub offset: u64,
}

impl LogFrame {
    /// Where the next frame begins.
    pub fn end(&self) -> u64 {
        self.offset.saturating_add(self.data.0.len() as u64)
    }
}

impl From<LogBytes> for Written {
    fn from(bytes: LogBytes) -> Self {
        match String::from_utf8(bytes.0) {
            Ok(data) => Written { data, encoding: None },
            Err(error) => {
                Written { data: STANDARD.encode(error.as_bytes()), encoding: Some("base64".to_owned()) }
            }
        }
    }
}

impl TryFrom<Written> for LogBytes {
    type Error = String;

    fn try_from(written: Written) -> Result<Self, String> {
        match written.encoding.as_deref() {
            None | Some("utf-8") => Ok(LogBytes(written.data.into_bytes())),
            Some("base64") => STANDARD
                .decode(&written.data)
                .map(LogBytes)
                .map_err(|error| format!("data is not base64: {error}")),
            Some(other) => Err(format!("encoding {other:?} is neither utf-8 nor base64")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_survive_whatever_they_are() {
        for bytes in [&b"text \xc3\xa9\n"[..], b"\xff\x00\x1b[0m", b""] {
            let frame = LogFrame {
                source: "ssh".into(),
                stream: "stdout".into(),
                offset: 7,
                data: LogBytes(bytes.to_vec()),
            };
            let text = serde_json::to_string(&frame).unwrap();
            assert_eq!(serde_json::from_str::<LogFrame>(&text).unwrap(), frame, "{text}");
            assert_eq!(frame.end(), 7 + bytes.len() as u64);
        }
        let odd = r#"{"source":"a","stream":"stdout","offset":0,"data":"x","encoding":"rot13"}"#;
        assert!(serde_json::from_str::<LogFrame>(odd).is_err());
    }
}
