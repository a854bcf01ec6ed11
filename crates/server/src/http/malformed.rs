//! What clients are told whose request was refused for its form, before any route was looked for.

use axum::response::{IntoResponse, Response};
use http::HeaderValue;

use super::error::{ApiError, Code};
use super::middleware::request_id::X_REQUEST_ID;
use crate::listener::Malformed;

/// In the shape of every other error.
pub fn answer(malformed: Malformed) -> Response {
    let code = if malformed == Malformed::TooSlow { Code::BodyTooSlow } else { Code::BadForm };
    let mut error = ApiError::new(code, malformed.to_string());
    error.status = malformed.status();
    let mut response = error.into_response();
    let id = crate::telemetry::ids::uuid().as_simple().to_string();
    if let Ok(id) = HeaderValue::try_from(id) {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    response
}
