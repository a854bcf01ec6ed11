//! Bodies and answers of the channel.

use std::{convert::Infallible, time::Duration};

use bytes::Bytes;
use http::{Response, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited, combinators::UnsyncBoxBody};
use hyper::body::Incoming;
use sandglass_bridge::wire::{ErrorBody, Refusal};
use sandglass_sandbox::Timestamp;
use serde::{Serialize, de::DeserializeOwned};

pub(super) type Body = UnsyncBoxBody<Bytes, Infallible>;

/// How long a body may take to arrive: it is there already when its agent begins to send it.
const BODY_PATIENCE: Duration = Duration::from_secs(10);

/// Why a call is not answered as it wished.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unanswered {
    Refused(Refusal),
    /// Not a message of the channel.
    Malformed(String),
    TooLarge,
    /// As many connections of the sandbox are open as may be.
    TooMany,
    NoSuchCall,
    /// The store failed: the agent keeps what it has and tries again.
    NotNow,
}

impl From<Refusal> for Unanswered {
    fn from(refusal: Refusal) -> Self {
        Self::Refused(refusal)
    }
}

impl Unanswered {
    pub(super) fn response(&self) -> Response<Body> {
        let (status, code, message) = match self {
            Self::Refused(refusal) => {
                let ErrorBody { code, message } = refusal.body();
                (refusal.status(), code, message)
            }
            Self::Malformed(why) => (400, "AGENT::MALFORMED".to_owned(), why.clone()),
            Self::TooLarge => (413, "AGENT::TOO_LARGE".to_owned(), "the message is too large".to_owned()),
            Self::TooMany => (
                429,
                "AGENT::TOO_MANY_CONNECTIONS".to_owned(),
                "the sandbox has too many connections; use one that is open".to_owned(),
            ),
            Self::NoSuchCall => (404, "AGENT::NO_SUCH_CALL".to_owned(), "there is no such call".to_owned()),
            Self::NotNow => (
                503,
                "AGENT::NOT_NOW".to_owned(),
                "it cannot be stored at the moment; send it again".to_owned(),
            ),
        };
        let mut response = json(&ErrorBody { code, message });
        *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        response
    }
}

/// Reads a body of at most `most` bytes.
pub(super) async fn body(body: Incoming, most: usize) -> Result<Bytes, Unanswered> {
    let read = tokio::time::timeout(BODY_PATIENCE, Limited::new(body, most).collect()).await;
    match read {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(error)) if error.is::<http_body_util::LengthLimitError>() => Err(Unanswered::TooLarge),
        Ok(Err(_)) | Err(_) => Err(Unanswered::Malformed("the body did not arrive".into())),
    }
}

pub(super) fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, Unanswered> {
    serde_json::from_slice(body).map_err(|e| Unanswered::Malformed(e.to_string()))
}

pub(super) fn json(value: &impl Serialize) -> Response<Body> {
    let written = serde_json::to_vec(value).unwrap_or_default();
    let mut response = Response::new(Full::from(written).boxed_unsync());
    response.headers_mut().insert(header::CONTENT_TYPE, http::HeaderValue::from_static("application/json"));
    response.headers_mut().insert(header::CACHE_CONTROL, http::HeaderValue::from_static("no-store"));
    response
}

/// The time of day as the channel has it.
pub(super) fn wall(at: Timestamp) -> jiff::Timestamp {
    jiff::Timestamp::from_millisecond(at.as_millis()).unwrap_or(jiff::Timestamp::UNIX_EPOCH)
}
