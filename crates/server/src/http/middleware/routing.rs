//! What the router does not do by itself: trailing slashes, methods it should not offer, and errors in our shape.

use axum::{
    extract::{OriginalUri, Request},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
};
use http::{Method, StatusCode, header, uri::Authority};
use sandglass_api::routes::{self, Mount};

use super::auth::is_proxied;
use crate::{
    http::error::{ApiError, Code},
    ingress::Observed,
};

/// Redirects away from a trailing slash and refuses HEAD and OPTIONS on our own routes.
pub async fn normalize(request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if is_proxied(path) {
        return next.run(request).await;
    }
    if let Some(bare) = path.strip_suffix('/')
        && known(bare)
    {
        return without_slash(&request, bare);
    }
    let response = if matches!(*request.method(), Method::HEAD | Method::OPTIONS) && known(path) {
        method_not_allowed(request).await.into_response()
    } else {
        next.run(request).await
    };
    // A body the extractors did not want is answered by axum in plain text.
    match response.status() {
        StatusCode::BAD_REQUEST | StatusCode::UNSUPPORTED_MEDIA_TYPE if is_plain_text(&response) => {
            ApiError::new(Code::BadRequest, "the request cannot be read").into_response()
        }
        _ => response,
    }
}

fn is_plain_text(response: &Response) -> bool {
    response.headers().get(header::CONTENT_TYPE).is_some_and(|v| v.as_bytes().starts_with(b"text/plain"))
}

fn without_slash(request: &Request, bare: &str) -> Response {
    let query = request.uri().query().map(|q| format!("?{q}")).unwrap_or_default();
    let target = match named(request) {
        Some(host) => {
            let scheme = Observed::of(request.headers(), request.extensions()).scheme;
            format!("{scheme}://{host}{bare}{query}")
        }
        None => format!("{bare}{query}"),
    };
    Redirect::temporary(&target).into_response()
}

/// How the client names this server. Only what is nothing but a name and a port may be repeated in a URL.
fn named(request: &Request) -> Option<&str> {
    let host = request.headers().get(header::HOST)?.to_str().ok()?;
    let authority: Authority = host.parse().ok()?;
    // The parser takes credentials, any text for a port, and punctuation that no name has.
    let name = authority.host();
    let port = host.strip_prefix(name)?;
    let numbered = port.is_empty() || authority.port_u16().is_some_and(|n| port == format!(":{n}"));
    let named = !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._[]:".contains(&b));
    (named && numbered).then_some(host)
}

/// 404 in our shape.
pub async fn not_found() -> ApiError {
    ApiError::no_such_route()
}

/// 405 in our shape, with the methods that the path does have.
pub async fn method_not_allowed(request: Request) -> ApiError {
    // Within a nested router the request's own path lacks the mount.
    let original = request.extensions().get::<OriginalUri>().map(|uri| &uri.0);
    let path = original.unwrap_or(request.uri()).path();
    let methods: Vec<&str> = routes::ROUTES
        .iter()
        .filter(|route| is_on(path, route.mount, route.path))
        .map(|r| r.method)
        .collect();
    ApiError::method_not_allowed(&methods.join(", "))
}

fn known(path: &str) -> bool {
    routes::ROUTES.iter().any(|route| is_on(path, route.mount, route.path))
}

fn is_on(path: &str, mount: Mount, template: &str) -> bool {
    mount.prefixes().iter().filter_map(|prefix| path.strip_prefix(prefix)).any(|rest| {
        let (mut wanted, mut given) = (template.split('/'), rest.split('/'));
        loop {
            match (wanted.next(), given.next()) {
                (None, None) => return true,
                (Some(w), Some(_)) if w.starts_with("{*") => return true,
                (Some(w), Some(g)) if w == g || (w.starts_with('{') && !g.is_empty()) => {}
                _ => return false,
            }
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_find_their_routes() {
        assert!(known("/sandboxes") && known("/v1/sandboxes/x/pause") && known("/health"));
        assert!(!known("/v1/health") && !known("/metrics/events") && !known("/sandboxes/x/nope"));
    }

    #[test]
    fn only_a_name_and_a_port_are_repeated() {
        let named = |host: &str| {
            let request = Request::builder().header("host", host).body(axum::body::Body::empty()).unwrap();
            named(&request).map(str::to_owned)
        };
        for host in ["example.test", "example.test:8080", "10.0.0.1:1", "[::1]:8080", "[::1]", "a_b"] {
            assert_eq!(named(host).as_deref(), Some(host));
        }
        for host in [
            "",
            "user@example.test",
            "example.test/path",
            "example.test?x",
            "example.test#x",
            "a b",
            "a:b",
            "a:99999",
            "a,b",
            "a\\b",
            "<script>",
            "\"",
            ":80",
            "[::1",
            "\u{e9}",
        ] {
            assert_eq!(named(host), None, "{host:?}");
        }
    }
}
