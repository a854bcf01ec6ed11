//! From HTTP to HTTPS: every request is sent to the same place under the other scheme.

use axum::{
    Router,
    extract::Request,
    response::{IntoResponse, Response},
};
use http::{HeaderValue, StatusCode, header, uri::Authority};

/// Answers 308 with the address under HTTPS at this port of the host that the client named. The method and body are kept.
pub fn redirects(port: u16) -> Router {
    Router::new().fallback(move |request: Request| async move { redirect(&request, port) })
}

fn redirect(request: &Request, port: u16) -> Response {
    // Who listens has seen to it that this is a name and nothing else; an empty one leads nowhere.
    let host =
        request.headers().get(header::HOST).and_then(|host| host.to_str().ok()?.parse::<Authority>().ok());
    let target = host.and_then(|host| {
        let at = if port == 443 { String::new() } else { format!(":{port}") };
        let path = request.uri().path_and_query().map_or("/", |path| path.as_str());
        let path = if path.starts_with('/') { path } else { "/" };
        HeaderValue::from_str(&format!("https://{}{at}{path}", host.host())).ok()
    });
    match target {
        Some(target) => (StatusCode::PERMANENT_REDIRECT, [(header::LOCATION, target)]).into_response(),
        None => StatusCode::BAD_REQUEST.into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn the_place_stays_and_the_scheme_changes() {
        for (host, target, port, expected) in [
            ("api.example", "/v1/sandboxes?a=%2F&b", 443, Some("https://api.example/v1/sandboxes?a=%2F&b")),
            ("api.example:80", "/", 8443, Some("https://api.example:8443/")),
            ("[::1]:8080", "//x", 443, Some("https://[::1]//x")),
            ("10.0.0.1", "*", 443, Some("https://10.0.0.1/")),
            ("", "/", 443, None),
        ] {
            let request = Request::builder().uri(target).header("host", host).body(Body::empty()).unwrap();
            let response = redirect(&request, port);
            let location = response.headers().get("location").map(|value| value.to_str().unwrap());
            assert_eq!(location, expected, "{host} {target}");
            assert_eq!(response.status().as_u16(), if expected.is_some() { 308 } else { 400 });
        }
    }
}
