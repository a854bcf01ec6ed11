//! Cross-origin rules: any origin, reflected. Preflight needs no key.

use axum::{
    extract::Request,
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{
    HeaderMap, HeaderName, HeaderValue, Method, StatusCode,
    header::{
        ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
        ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
        ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
    },
};

const METHODS: &str = "DELETE, GET, HEAD, OPTIONS, PATCH, POST, PUT";

/// Answers preflights and marks every other response.
pub async fn answer(request: Request, next: Next) -> Response {
    around(request, |request| next.run(request)).await
}

/// The same around whatever answers.
pub async fn around<F>(request: Request, handle: impl FnOnce(Request) -> F) -> Response
where
    F: Future<Output = Response>,
{
    let origin = request.headers().get(ORIGIN).cloned();
    let preflight =
        request.method() == Method::OPTIONS && request.headers().contains_key(ACCESS_CONTROL_REQUEST_METHOD);
    if let (Some(origin), true) = (&origin, preflight) {
        let wanted = request.headers().get(ACCESS_CONTROL_REQUEST_HEADERS).cloned();
        return preflight_answer(origin, wanted);
    }
    let mut response = handle(request).await;
    if let Some(origin) = origin {
        allow(response.headers_mut(), &origin);
        response
            .headers_mut()
            .insert(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static("OPEN-SANDBOX-ORIGIN"));
    }
    let varies =
        response.headers().get_all(VARY).iter().any(|v| v.as_bytes().eq_ignore_ascii_case(b"origin"));
    if !varies {
        response.headers_mut().append(VARY, HeaderValue::from_static("Origin"));
    }
    response
}

/// Replaces rather than adds: what an application behind the proxy said must not stand beside it.
fn allow(headers: &mut HeaderMap, origin: &HeaderValue) {
    headers.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin.clone());
    headers.insert(ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true"));
}

fn preflight_answer(origin: &HeaderValue, wanted: Option<HeaderValue>) -> Response {
    let mut response = (StatusCode::OK, "OK").into_response();
    let headers = response.headers_mut();
    allow(headers, origin);
    let fixed: [(HeaderName, &'static str); 3] =
        [(ACCESS_CONTROL_ALLOW_METHODS, METHODS), (ACCESS_CONTROL_MAX_AGE, "600"), (VARY, "Origin")];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
    if let Some(wanted) = wanted {
        headers.insert(ACCESS_CONTROL_ALLOW_HEADERS, wanted);
    }
    response
}
