//! Reading what arrived: request bodies and query strings, before anything is known about their meaning.
//!
//! The invariant: no input, however odd, panics or costs more than its own size.

use std::time::Duration;

use axum::{
    body::to_bytes,
    extract::{FromRequest, Request},
};
use bytes::Bytes;
use http::header;
use sandglass_api::error::{FieldError, Loc};
use serde_json::Value;

use super::error::{ApiError, ApiResult, Code};

/// Largest request body of the API itself; proxied bodies are not bounded by it.
pub const MAX_BODY_BYTES: usize = 1 << 20;

/// How long a body of the API itself may take to arrive: it holds one of the server's slots meanwhile.
const BODY_PATIENCE: Duration = Duration::from_secs(20);

/// A request body as it arrived, with the type it claims to have.
#[derive(Clone, Debug, Default)]
pub struct RawBody {
    pub content_type: Option<String>,
    pub bytes: Bytes,
}

impl<S: Send + Sync> FromRequest<S> for RawBody {
    type Rejection = ApiError;

    async fn from_request(request: Request, _state: &S) -> Result<Self, ApiError> {
        let content_type = request
            .headers()
            .get(header::CONTENT_TYPE)
            .map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
        let too_large =
            || ApiError::new(Code::BodyTooLarge, "the request body is larger than 1 MiB or was cut off");
        let told = request.headers().get(header::CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        if told
            .and_then(|length| length.parse::<u64>().ok())
            .is_some_and(|length| length > MAX_BODY_BYTES as u64)
        {
            return Err(too_large());
        }
        let read = to_bytes(request.into_body(), MAX_BODY_BYTES);
        let bytes = tokio::time::timeout(BODY_PATIENCE, read)
            .await
            .map_err(|_| ApiError::new(Code::BodyTooSlow, "the request body did not arrive in time"))?
            .map_err(|_| too_large())?;
        Ok(Self { content_type, bytes })
    }
}

impl RawBody {
    /// A JSON body, for tests and for callers that have the bytes already.
    pub fn json(bytes: impl Into<Bytes>) -> Self {
        Self { content_type: Some("application/json".to_owned()), bytes: bytes.into() }
    }

    /// The JSON value of a body that may be absent: no body and `null` are both `None`.
    pub fn optional(&self) -> ApiResult<Option<Value>> {
        if self.bytes.is_empty() {
            return Ok(None);
        }
        if !is_json(self.content_type.as_deref()) {
            return Err(single(
                "model_attributes_type",
                vec![Loc::from("body")],
                "Input should be a valid dictionary or object to extract fields from",
            ));
        }
        match serde_json::from_slice(&self.bytes) {
            Ok(Value::Null) => Ok(None),
            Ok(value) => Ok(Some(value)),
            Err(error) => {
                let offset = offset_of(&self.bytes, error.line(), error.column());
                Err(single("json_invalid", vec![Loc::from("body"), Loc::from(offset)], "JSON decode error"))
            }
        }
    }

    /// The JSON value of a body that must be there.
    pub fn required(&self) -> ApiResult<Value> {
        self.optional()?.ok_or_else(|| single("missing", vec![Loc::from("body")], "Field required"))
    }
}

fn single(kind: &str, loc: Vec<Loc>, msg: &str) -> ApiError {
    ApiError::malformed(vec![FieldError { kind: kind.to_owned(), loc, msg: msg.to_owned() }])
}

/// `application/json` or `application/<anything>+json`, parameters and case aside.
fn is_json(content_type: Option<&str>) -> bool {
    let essence = content_type.unwrap_or_default().split(';').next().unwrap_or_default().trim();
    match essence.to_ascii_lowercase().strip_prefix("application/") {
        Some("json") => true,
        Some(subtype) => subtype.len() > "+json".len() && subtype.ends_with("+json"),
        None => false,
    }
}

/// The byte offset of a one-based line and column.
fn offset_of(bytes: &[u8], line: usize, column: usize) -> usize {
    let start = match line.checked_sub(2) {
        None => 0,
        Some(earlier) => bytes
            .iter()
            .enumerate()
            .filter(|(_, byte)| **byte == b'\n')
            .nth(earlier)
            .map_or(0, |(newline, _)| newline + 1),
    };
    start.saturating_add(column.saturating_sub(1)).min(bytes.len())
}

/// A decoded query string; order and repetition are kept.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QueryString(Vec<(String, String)>);

impl QueryString {
    /// From the raw text after `?`. Segments without `=` have an empty value.
    pub fn parse(raw: Option<&str>) -> Self {
        let pairs = raw
            .unwrap_or_default()
            .split('&')
            .filter(|segment| !segment.is_empty())
            .map(|segment| {
                let (name, value) = segment.split_once('=').unwrap_or((segment, ""));
                (percent_decode(name), percent_decode(value))
            })
            .collect();
        Self(pairs)
    }

    /// The value of a parameter; when it is repeated the last one counts.
    pub fn last(&self, name: &str) -> Option<&str> {
        self.0.iter().rev().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Every value of a parameter, in order.
    pub fn all<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a str> {
        self.0.iter().filter(move |(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

/// Form decoding: `%xx` and `+`; what is no valid escape stays as it is, what is no UTF-8 is replaced.
pub fn percent_decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, tail)) = rest.split_first() {
        rest = tail;
        match first {
            b'+' => bytes.push(b' '),
            b'%' => match tail {
                [high, low, after @ ..] if let (Some(high), Some(low)) = (hex(*high), hex(*low)) => {
                    bytes.push(high << 4 | low);
                    rest = after;
                }
                _ => bytes.push(b'%'),
            },
            other => bytes.push(other),
        }
    }
    match String::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
    }
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_json_types_are_json() {
        for yes in ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"] {
            assert!(is_json(Some(yes)), "{yes}");
        }
        for no in ["", "text/json", "application/x-www-form-urlencoded", "application/+json", "json"] {
            assert!(!is_json(Some(no)), "{no}");
        }
        assert!(!is_json(None));
    }

    fn kind(body: &RawBody) -> String {
        body.required().unwrap_err().fields()[0].kind.clone()
    }

    #[test]
    fn a_bad_body_says_what_is_wrong_with_it() {
        assert_eq!(kind(&RawBody::json("")), "missing");
        assert_eq!(kind(&RawBody::json("null")), "missing");
        assert_eq!(kind(&RawBody::json("{")), "json_invalid");
        assert_eq!(kind(&RawBody::json(vec![0xff, 0xfe])), "json_invalid");
        assert_eq!(kind(&RawBody::json("[".repeat(100_000))), "json_invalid");
        assert_eq!(kind(&RawBody { content_type: None, bytes: "{}".into() }), "model_attributes_type");
    }

    #[test]
    fn a_syntax_error_is_located() {
        let error = RawBody::json("{\n  \"a\": x}").required().unwrap_err();
        assert_eq!(error.fields()[0].loc, [Loc::from("body"), Loc::from(9)]);
    }

    #[test]
    fn query_strings_keep_repetition_and_blank_values() {
        let query = QueryString::parse(Some("state=a&state=b&x&y=1%2&&z=%E4%BD%A0+%ff"));
        assert_eq!(query.all("state").collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(query.last("state"), Some("b"));
        assert_eq!(query.last("x"), Some(""));
        assert_eq!(query.last("y"), Some("1%2"));
        assert_eq!(query.last("z"), Some("你 \u{fffd}"));
        assert_eq!(query.last("none"), None);
    }
}
