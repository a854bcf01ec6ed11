//! Around every request: its id (the caller's own or a fresh one), its span, its access record, its place in the metrics. Also the last resort
//! for a panic.

use std::{any::Any, future::Future, panic::AssertUnwindSafe, time::Duration};

use axum::{
    extract::{MatchedPath, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use futures_util::FutureExt;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, Uri, header::UPGRADE};
use tracing::{error, info};

use super::auth::is_proxied;
use crate::{
    http::error::ApiError,
    telemetry::{
        Telemetry, current, ids,
        logs::ACCESS_TARGET,
        metrics::{Proxied, RouteName, method_name, route_of},
        traces::{self, Span},
    },
};

/// The header in both directions.
pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longer ids are cut off by nobody else, so they are not taken over.
const MAX_CHARS: usize = 256;

fn of(request: &Request) -> HeaderValue {
    request
        .headers()
        .get(X_REQUEST_ID)
        .and_then(|value| value.to_str().ok())
        .map(str::trim)
        .filter(|text| !text.is_empty() && text.len() <= MAX_CHARS)
        .and_then(|text| HeaderValue::from_str(text).ok())
        .unwrap_or_else(|| {
            let mut text = [0; uuid::fmt::Simple::LENGTH];
            let fresh = ids::uuid().as_simple().encode_lower(&mut text);
            HeaderValue::from_str(fresh).expect("hexadecimal digits are a header value")
        })
}

/// What is remembered of a request until its answer.
struct Asked {
    started: tokio::time::Instant,
    method: Method,
    route: RouteName,
    uri: Uri,
    upgrade: bool,
    websocket: bool,
}

impl Asked {
    fn of(request: &Request, route: RouteName) -> Self {
        Self {
            started: tokio::time::Instant::now(),
            method: request.method().clone(),
            route,
            uri: request.uri().clone(),
            upgrade: request.headers().contains_key(UPGRADE),
            websocket: is_websocket(request.headers()),
        }
    }

    fn path(&self) -> &str {
        without_the_programs_part(self.uri.path())
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
pub async fn attach(State(telemetry): State<Telemetry>, request: Request, next: Next) -> Response {
    let route = route_of(request.extensions().get::<MatchedPath>());
    around(&telemetry, route, request, |request| next.run(request)).await
}

/// The same around whatever answers on this route.
pub async fn around<F>(
    telemetry: &Telemetry,
    route: RouteName,
    request: Request,
    handle: impl FnOnce(Request) -> F,
) -> Response
where
    F: Future<Output = Response>,
{
    let asked = Asked::of(&request, route);
    let id = of(&request);
    let trace = telemetry
        .tracer
        .request(request.headers(), || format!("{} {}", method_name(&asked.method), asked.route.as_str()));
    let handling = traces::scoped(trace.as_ref(), handle(request));
    let handled = current::within(id.clone(), AssertUnwindSafe(handling).catch_unwind()).await;
    let mut response = handled.unwrap_or_else(|panic| {
        current::within_sync(id.clone(), || error!(panic = text_of(&*panic), "a handler panicked"));
        ApiError::internal().into_response()
    });
    let took = asked.started.elapsed();
    asked.count(telemetry, &response, took);
    if let Some(trace) = trace {
        finish(trace, &asked, &id, response.status());
    }
    // The query is left out: it may carry what does not belong into logs.
    info!(
        target: ACCESS_TARGET,
        request_id = id.to_str().unwrap_or_default(),
        method = asked.method.as_str(),
        route = asked.route.as_str(),
        path = asked.path(),
        status = response.status().as_u16(),
        duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX),
        "request"
    );
    response.headers_mut().insert(X_REQUEST_ID, id);
    response
}

fn finish(mut trace: Span, asked: &Asked, id: &HeaderValue, status: StatusCode) {
    trace.text("http.request.method", method_name(&asked.method));
    trace.text("http.route", asked.route.as_str());
    trace.text("url.path", asked.path().to_owned());
    trace.text("opensandbox.request_id", id.to_str().unwrap_or_default().to_owned());
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
