//! Around every request: its id (the caller's own or a fresh one), its span, its access record, its place in the metrics. Also the last resort
//! for a panic.

use std::{any::Any, panic::AssertUnwindSafe, time::Duration};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header::UPGRADE};
use tracing::{Instrument, error, error_span, info};

use super::auth::is_proxied;
use crate::{
    http::error::ApiError,
    telemetry::{
        Telemetry,
        logs::ACCESS_TARGET,
        metrics::{Proxied, RouteName, method_name, route_of},
        traces::{self, Span},
    },
};

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

/// What is remembered of a request until its answer.
struct Asked {
    started: tokio::time::Instant,
    method: Method,
    route: RouteName,
    path: String,
    upgrade: bool,
    websocket: bool,
}

impl Asked {
    fn of(request: &Request) -> Self {
        let path = request.uri().path();
        Self {
            started: tokio::time::Instant::now(),
            method: request.method().clone(),
            route: route_of(request.extensions().get::<MatchedPath>()),
            path: without_the_programs_part(path).to_owned(),
            upgrade: request.headers().contains_key(UPGRADE),
            websocket: is_websocket(request.headers()),
        }
    }

    fn count(&self, telemetry: &Telemetry, response: &Response, took: Duration) {
        let status = response.status();
        // A WebSocket lasts as long as somebody likes; refused ones are left out as well, as in the reference.
        if !self.websocket && status != StatusCode::SWITCHING_PROTOCOLS {
            telemetry.metrics.requests.record(&self.method, self.route, status, took);
        }
        if let Some(outcome) = response.extensions().get::<Proxied>() {
            telemetry.metrics.count_proxied(self.upgrade, *outcome);
        }
    }
}

fn is_websocket(headers: &HeaderMap) -> bool {
    headers.get(UPGRADE).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"websocket"))
}

/// What follows the port belongs to the program in the sandbox, and may hold what does not belong into logs.
fn without_the_programs_part(path: &str) -> &str {
    if !is_proxied(path) {
        return path;
    }
    let segments = if path.starts_with("/v1/") { 5 } else { 4 };
    path.match_indices('/').nth(segments).map_or(path, |(end, _)| &path[..end])
}

/// Attaches the id, and records the request when it is answered.
pub async fn attach(State(telemetry): State<Telemetry>, mut request: Request, next: Next) -> Response {
    let asked = Asked::of(&request);
    let id = of(&request);
    let text = id.to_str().unwrap_or_default();
    request.extensions_mut().insert(RequestId(id.clone()));
    // At the highest level, so that the id is there at whatever level is logged.
    let span = error_span!("request", request_id = text);
    let trace = telemetry
        .tracer
        .request(request.headers(), || format!("{} {}", method_name(&asked.method), asked.route.as_str()));
    let handling = traces::scoped(trace.as_ref(), next.run(request));
    let handled = AssertUnwindSafe(handling).catch_unwind().instrument(span.clone()).await;
    let mut response = handled.unwrap_or_else(|panic| {
        span.in_scope(|| error!(panic = text_of(&*panic), "a handler panicked"));
        ApiError::internal().into_response()
    });
    let took = asked.started.elapsed();
    asked.count(&telemetry, &response, took);
    if let Some(trace) = trace {
        finish(trace, &asked, text, response.status());
    }
    // The query is left out: it may carry what does not belong into logs.
    info!(
        target: ACCESS_TARGET,
        parent: &span,
        method = asked.method.as_str(),
        route = asked.route.as_str(),
        path = asked.path,
        status = response.status().as_u16(),
        duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        "request"
    );
    response.headers_mut().insert(X_REQUEST_ID, id);
    response
}

fn finish(mut trace: Span, asked: &Asked, id: &str, status: StatusCode) {
    trace.text("http.request.method", method_name(&asked.method));
    trace.text("http.route", asked.route.as_str());
    trace.text("url.path", asked.path.clone());
    trace.text("opensandbox.request_id", id.to_owned());
    trace.number("http.response.status_code", i64::from(status.as_u16()));
    if status.is_server_error() {
        trace.fail(status.as_str().to_owned());
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_of_programs_are_not_logged() {
        for (path, logged) in [
            ("/v1/sandboxes/a/proxy/80/secret/x", "/v1/sandboxes/a/proxy/80"),
            ("/sandboxes/a/proxy/80/", "/sandboxes/a/proxy/80"),
            ("/sandboxes/a/proxy/80", "/sandboxes/a/proxy/80"),
            ("/v1/sandboxes/a/pause", "/v1/sandboxes/a/pause"),
            ("/", "/"),
        ] {
            assert_eq!(without_the_programs_part(path), logged);
        }
    }
}
