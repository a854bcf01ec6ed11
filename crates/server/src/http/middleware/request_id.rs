//! Request ids: the caller's own or a fresh one, on every response and in every log line about the request. Also the last resort for a panic.

use std::{any::Any, panic::AssertUnwindSafe};

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use http::{HeaderName, HeaderValue};
use tracing::{Instrument, error, info, info_span};

use crate::{http::error::ApiError, telemetry::logs::ACCESS_TARGET};

/// The header in both directions.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer ids are cut off by nobody else, so they are not taken over.
const MAX_CHARS: usize = 256;

/// The id of a request, in its extensions.
#[derive(Clone, Debug)]
pub struct RequestId(pub HeaderValue);

fn of(request: &Request) -> HeaderValue {
    request
        .headers()
        .get(X_REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .map(str::trim)
        .filter(|text| !text.is_empty() && text.len() <= MAX_CHARS)
        .and_then(|text| HeaderValue::from_str(text).ok())
        .unwrap_or_else(|| {
            let fresh = uuid::Uuid::new_v4().as_simple().to_string();
            HeaderValue::try_from(fresh).expect("hexadecimal digits are a header value")
        })
}

/// Attaches the id and writes one access record.
pub async fn attach(mut request: Request, next: Next) -> Response {
    let started = tokio::time::Instant::now();
    let id = of(&request);
    let text = id.to_str().unwrap_or_default().to_owned();
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    request.extensions_mut().insert(RequestId(id.clone()));
    let span = info_span!("request", request_id = text.as_str());
    let handled = AssertUnwindSafe(next.run(request)).catch_unwind().instrument(span.clone()).await;
    let mut response = handled.unwrap_or_else(|panic| {
        span.in_scope(|| error!(panic = text_of(&*panic), "a handler panicked"));
        ApiError::internal().into_response()
    });
    response.headers_mut().insert(X_REQUEST_ID, id);
    // The query is left out: it may carry what does not belong into logs.
    info!(
        target: ACCESS_TARGET,
        parent: &span,
        %method,
        path,
        status = response.status().as_u16(),
        duration_ms = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX),
        "request"
    );
    response
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
