//! What is sent back: JSON when it went well, plain text when it did not, as the published clients expect.

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;

const TEXT: &str = "text/plain; charset=utf-8";

/// An answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub status: StatusCode,
    pub content_type: &'static str,
    /// The value of `Allow`, with 405.
    pub allow: Option<&'static str>,
    pub body: String,
}

impl Answer {
    /// An error's text with the end of line that clients see.
    pub fn text(status: StatusCode, text: &str) -> Self {
        Self { status, content_type: TEXT, allow: None, body: format!("{text}\n") }
    }

    /// Exactly this text.
    pub fn plain(status: StatusCode, text: &str) -> Self {
        Self { status, content_type: TEXT, allow: None, body: text.to_owned() }
    }

    pub fn json(value: &impl Serialize) -> Self {
        let body = serde_json::to_string(value).expect("views have text keys only");
        Self { status: StatusCode::OK, content_type: "application/json", allow: None, body }
    }

    pub fn wrong_method(allow: &'static str) -> Self {
        Self { allow: Some(allow), ..Self::text(StatusCode::METHOD_NOT_ALLOWED, "method not allowed") }
    }
}

impl From<Answer> for Response<Full<Bytes>> {
    fn from(answer: Answer) -> Self {
        let mut response = Response::new(Full::from(answer.body));
        *response.status_mut() = answer.status;
        let headers = response.headers_mut();
        if answer.status != StatusCode::NO_CONTENT {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static(answer.content_type));
        }
        if let Some(allow) = answer.allow {
            headers.insert(ALLOW, HeaderValue::from_static(allow));
        }
        response
    }
}
