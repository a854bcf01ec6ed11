use axum::{
    Router,
    body::{Body, to_bytes},
    middleware::{from_fn, from_fn_with_state},
    routing::{any, get, post},
};
use http::{Request, StatusCode};
use serde_json::Value;
use tower::ServiceExt;

use super::*;
use crate::telemetry::{
    Telemetry,
    metrics::prometheus,
    traces::{Sampler, Tracer},
};

async fn explode() -> &'static str {
    panic!("on purpose")
}

/// The layers in the order in which the real router has them, around stand-ins for its routes.
fn stack(key: Option<&str>, cap: Option<usize>) -> Router {
    counted(key, cap, Telemetry::default())
}

fn counted(key: Option<&str>, cap: Option<usize>, telemetry: Telemetry) -> Router {
    let keys = crate::tenants::Keyring::single(key);
    let door = auth::Door { keys, open_metrics: false, ingress_key: None };
    Router::new()
        .route("/health", get(|| async { "up" }))
        .route("/sandboxes", post(|| async { "made" }).get(|| async { "list" }))
        .route("/sandboxes/{id}", get(explode))
        .route("/sandboxes/{id}/proxy/{port}/", any(|| async { "app" }))
        .fallback(routing::not_found)
        .method_not_allowed_fallback(routing::method_not_allowed)
        .layer(from_fn(routing::normalize))
        .layer(from_fn_with_state(door, auth::require_key))
        .layer(from_fn_with_state(concurrency::Cap::new(cap), concurrency::limit))
        .layer(from_fn(cors::answer))
        .layer(from_fn_with_state(telemetry, request_id::attach))
}

struct Seen {
    status: StatusCode,
    headers: http::HeaderMap,
    text: String,
}

impl Seen {
    fn code(&self) -> String {
        let body: Value = serde_json::from_str(&self.text).unwrap();
        assert!(body["message"].is_string());
        body["code"].as_str().unwrap().to_owned()
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

async fn send(app: Router, method: &str, path: &str, headers: &[(&str, &str)]) -> Seen {
    let mut request = Request::builder().method(method).uri(path).header("host", "example.test");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = app.oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    let text = String::from_utf8(to_bytes(body, 1 << 20).await.unwrap().to_vec()).unwrap();
    Seen { status: parts.status, headers: parts.headers, text }
}

#[tokio::test]
async fn every_error_has_a_code_and_a_request_id() {
    let key = [("open-sandbox-api-key", "k")];
    for (method, path, headers, status, code) in [
        ("GET", "/sandboxes", &[][..], 401, "MISSING_API_KEY"),
        ("GET", "/sandboxes", &[("open-sandbox-api-key", "x")][..], 401, "INVALID_API_KEY"),
        ("GET", "/healthzzz", &[][..], 401, "MISSING_API_KEY"),
        ("GET", "/v1/health", &[][..], 401, "MISSING_API_KEY"),
        ("GET", "/nothing", &key[..], 404, "GENERAL::NOT_FOUND"),
        ("GET", "/sandboxes/a%2Fb/x", &key[..], 404, "GENERAL::NOT_FOUND"),
        ("DELETE", "/sandboxes", &key[..], 405, "GENERAL::METHOD_NOT_ALLOWED"),
        ("HEAD", "/sandboxes", &key[..], 405, ""),
        ("OPTIONS", "/sandboxes", &key[..], 405, "GENERAL::METHOD_NOT_ALLOWED"),
        ("GET", "/sandboxes/x", &key[..], 500, "GENERAL::UNKNOWN_ERROR"),
    ] {
        let seen = send(stack(Some("k"), None), method, path, headers).await;
        assert_eq!(seen.status.as_u16(), status, "{method} {path}");
        if !code.is_empty() {
            assert_eq!(seen.code(), code, "{method} {path}");
        }
        assert_eq!(seen.header("x-request-id").len(), 32, "{method} {path}");
        // A panic is caught outside the cross-origin layer.
        let vary = if status == 500 { "" } else { "Origin" };
        assert_eq!(seen.header("vary"), vary, "{method} {path}");
        assert!(!seen.text.contains("on purpose"));
    }
}

#[tokio::test]
async fn open_paths_and_ports_of_sandboxes_need_no_key() {
    for (method, path) in
        [("GET", "/health"), ("GET", "/sandboxes/x/proxy/80/"), ("HEAD", "/sandboxes/x/proxy/80/")]
    {
        let seen = send(stack(Some("k"), None), method, path, &[]).await;
        assert_eq!(seen.status, 200, "{method} {path}");
    }
    assert_eq!(send(stack(None, None), "GET", "/sandboxes", &[]).await.text, "list");
}

#[tokio::test]
async fn a_callers_request_id_comes_back_trimmed() {
    let ids = [("  mine \t", "mine"), ("a b", "a b")];
    for (sent, echoed) in ids {
        let seen = send(stack(None, None), "GET", "/health", &[("x-request-id", sent)]).await;
        assert_eq!(seen.header("x-request-id"), echoed);
    }
    for replaced in ["", "  "] {
        let seen = send(stack(None, None), "GET", "/health", &[("x-request-id", replaced)]).await;
        assert_eq!(seen.header("x-request-id").len(), 32, "{replaced:?}");
    }
}

#[tokio::test]
async fn preflight_passes_without_a_key_and_origins_are_reflected() {
    let asked = [
        ("origin", "https://ui.test"),
        ("access-control-request-method", "POST"),
        ("access-control-request-headers", "x-a, x-b"),
    ];
    let seen = send(stack(Some("k"), None), "OPTIONS", "/v1/sandboxes", &asked).await;
    assert_eq!((seen.status.as_u16(), seen.text.as_str()), (200, "OK"));
    assert_eq!(seen.header("access-control-allow-origin"), "https://ui.test");
    assert_eq!(seen.header("access-control-allow-headers"), "x-a, x-b");
    assert_eq!(seen.header("access-control-max-age"), "600");
    let refused = send(stack(Some("k"), None), "GET", "/sandboxes", &asked[..1]).await;
    assert_eq!(refused.status, 401);
    assert_eq!(refused.header("access-control-allow-origin"), "https://ui.test");
    assert_eq!(refused.header("access-control-expose-headers"), "OPEN-SANDBOX-ORIGIN");
}

#[tokio::test]
async fn trailing_slashes_redirect_to_this_server() {
    let seen = send(stack(None, None), "POST", "/sandboxes/?a=b", &[]).await;
    assert_eq!(seen.status, 307);
    assert_eq!(seen.header("location"), "http://example.test/sandboxes?a=b");
    for path in ["/x//evil.test/", "/nothing/", "/sandboxes//", "/"] {
        assert_eq!(send(stack(None, None), "GET", path, &[]).await.status, 404, "{path}");
    }
    // Which routes exist is not told to whoever has no key.
    assert_eq!(send(stack(Some("k"), None), "POST", "/sandboxes/", &[]).await.status, 401);
}

#[tokio::test]
async fn over_the_cap_is_503_but_health_and_ports_still_answer() {
    let seen = send(stack(None, Some(0)), "GET", "/sandboxes", &[]).await;
    assert_eq!((seen.status.as_u16(), seen.code().as_str()), (503, "GENERAL::UNAVAILABLE"));
    for path in ["/health", "/sandboxes/x/proxy/80/"] {
        assert_eq!(send(stack(None, Some(0)), "GET", path, &[]).await.status, 200, "{path}");
    }
}

#[tokio::test]
async fn every_request_is_measured_by_its_route_except_websockets() {
    let telemetry = Telemetry::default();
    let send = async |method: &str, path: &str, headers: &[(&str, &str)]| {
        send(counted(Some("k"), None, telemetry.clone()), method, path, headers).await
    };
    let key = ("open-sandbox-api-key", "k");
    send("GET", "/health", &[]).await;
    send("GET", "/health", &[]).await;
    send("GET", "/sandboxes", &[]).await;
    send("DELETE", "/sandboxes", &[key]).await;
    send("GET", "/sandboxes/x", &[key]).await;
    send("GET", "/nothing/at/all", &[key]).await;
    send("PROPFIND", "/sandboxes/x/proxy/80/", &[key]).await;
    send("GET", "/sandboxes/x/proxy/80/", &[("upgrade", "WebSocket"), ("connection", "upgrade")]).await;
    let page = prometheus::page(&telemetry.metrics.families(None));
    let counts: Vec<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("server_http_request_duration_milliseconds_count"))
        .collect();
    let proxied = "/sandboxes/{sandbox_id}/proxy/{port}/{full_path:path}";
    let mut expected = vec![
        "{http_method=\"GET\",http_route=\"unknown\",http_status_code=\"404\"} 1".to_owned(),
        "{http_method=\"GET\",http_route=\"/sandboxes\",http_status_code=\"401\"} 1".to_owned(),
        "{http_method=\"DELETE\",http_route=\"/sandboxes\",http_status_code=\"405\"} 1".to_owned(),
        "{http_method=\"GET\",http_route=\"/sandboxes/{sandbox_id}\",http_status_code=\"500\"} 1".to_owned(),
        format!("{{http_method=\"OTHER\",http_route=\"{proxied}\",http_status_code=\"200\"}} 1"),
        "{http_method=\"GET\",http_route=\"/health\",http_status_code=\"200\"} 2".to_owned(),
    ];
    let mut counts: Vec<String> = counts.into_iter().map(str::to_owned).collect();
    counts.sort();
    expected.sort();
    assert_eq!(counts, expected);
}

#[tokio::test]
async fn a_request_is_a_span_below_its_callers() {
    let (queue, mut ended) = tokio::sync::mpsc::channel(8);
    let metrics = std::sync::Arc::default();
    let tracer =
        Tracer::new(queue, Sampler { follow_parent: true, ratio: 1.0 }, std::sync::Arc::clone(&metrics));
    let app = counted(None, None, Telemetry { metrics, tracer });
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    send(app, "GET", "/sandboxes/x", &[("traceparent", parent), ("x-request-id", "r1")]).await;
    let span = ended.try_recv().unwrap();
    assert_eq!(span.name, "GET /sandboxes/{sandbox_id}");
    assert_eq!(span.parent.unwrap()[7], 0x31);
    assert_eq!(span.failure.as_deref(), Some("500"));
    assert!(format!("{:?}", span.attributes).contains("r1"));
}
