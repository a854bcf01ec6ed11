//! What an ingress elsewhere writes into the list: that a sandbox was used.

use std::time::Duration;

use sandglass_sandbox::Timestamp;
use serde::Deserialize;

/// Older messages are about a use that is no reason to live on any more.
const OLDEST: Duration = Duration::from_secs(300);

#[derive(Deserialize)]
struct Raw {
    sandbox_id: String,
    observed_at: String,
    // Read so that a message with the wrong types is refused as the reference refuses it.
    #[serde(default, rename = "port")]
    _port: Option<i64>,
    #[serde(default, rename = "request_uri")]
    _request_uri: Option<String>,
    #[serde(default, rename = "namespace")]
    _namespace: Option<String>,
}

/// A message that makes sense.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) sandbox: String,
    pub(super) used_at: Timestamp,
}

/// Why a message is dropped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unfit {
    Invalid,
    Stale,
}

impl Message {
    pub(super) fn parse(text: &[u8], now: Timestamp) -> Result<Self, Unfit> {
        let raw: Raw = serde_json::from_slice(text).map_err(|_| Unfit::Invalid)?;
        let used_at: jiff::Timestamp = raw.observed_at.trim().parse().map_err(|_| Unfit::Invalid)?;
        let sandbox = raw.sandbox_id.trim();
        if sandbox.is_empty() {
            return Err(Unfit::Invalid);
        }
        let used_at = Timestamp::clamped(used_at.as_millisecond());
        if used_at.until(now) > OLDEST {
            return Err(Unfit::Stale);
        }
        Ok(Self { sandbox: sandbox.to_owned(), used_at })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Message, Unfit> {
        // 2026-01-02T03:04:05Z
        Message::parse(text.as_bytes(), Timestamp::clamped(1_767_323_045_000))
    }

    #[test]
    fn messages_are_read_as_documented() {
        let at = |observed: &str| parse(&format!(r#"{{"sandbox_id":" a ","observed_at":"{observed}"}}"#));
        let message = at("2026-01-02T03:04:04.123456789Z").unwrap();
        assert_eq!((message.sandbox.as_str(), message.used_at.as_millis()), ("a", 1_767_323_044_123));
        for (fresh, verdict) in [
            ("2026-01-02T04:04:05+01:00", None),
            ("2026-01-02T02:59:05Z", None),
            ("2026-01-02T02:59:04.999Z", Some(Unfit::Stale)),
            ("1999-01-01T00:00:00Z", Some(Unfit::Stale)),
            // A clock that runs ahead.
            ("2026-01-02T03:09:00Z", None),
            ("2026-01-02 ", Some(Unfit::Invalid)),
            ("2026-01-02T03:04:05", Some(Unfit::Invalid)),
            ("yesterday", Some(Unfit::Invalid)),
        ] {
            assert_eq!(at(fresh).err(), verdict, "{fresh}");
        }
        let whole = r#"{"sandbox_id":"a","observed_at":"2026-01-02T03:04:05Z","port":80,"request_uri":"/","namespace":"n","x":1}"#;
        assert!(parse(whole).is_ok());
    }

    #[test]
    fn garbage_is_invalid() {
        for text in [
            "",
            "null",
            "[]",
            "{}",
            "{",
            "\u{0}\u{1}",
            r#"{"sandbox_id":"a"}"#,
            r#"{"observed_at":"2026-01-02T03:04:05Z"}"#,
            r#"{"sandbox_id":7,"observed_at":"2026-01-02T03:04:05Z"}"#,
            r#"{"sandbox_id":" ","observed_at":"2026-01-02T03:04:05Z"}"#,
            r#"{"sandbox_id":"a","observed_at":1767323045}"#,
            r#"{"sandbox_id":"a","observed_at":"2026-01-02T03:04:05Z","port":"80"}"#,
        ] {
            assert_eq!(parse(text), Err(Unfit::Invalid), "{text}");
        }
        assert_eq!(Message::parse(b"\xff\xfe", Timestamp::clamped(0)), Err(Unfit::Invalid));
        let deep = "[".repeat(100_000);
        assert_eq!(parse(&deep), Err(Unfit::Invalid));
    }
}
