//! The whole router over fakes: what every route has in common.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::{HeaderMap, Request, StatusCode};
use sandglass_api::routes::{ROUTES, Route};
use sandglass_images::ImageStore;
use sandglass_server::{
    config::{Config, Secret},
    engine::{Engine, Settings},
    http::{App, images::Images, router},
    tenants::Keyring,
};
use sandglass_testkit::{FakeRuntime, ManualClock, MemoryStore};
use serde_json::{Value, json};
use tower::ServiceExt;

const KEY: &str = "open-sandbox-api-key";

struct Edge {
    router: Router,
    _dir: tempfile::TempDir,
}

struct Seen {
    status: StatusCode,
    headers: HeaderMap,
    text: String,
}

impl Seen {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("{} {:?}", self.status, self.text))
    }

    fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

impl Edge {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let engine = Engine::new(
            Arc::<FakeRuntime>::default(),
            Arc::<MemoryStore>::default(),
            Arc::<ManualClock>::default(),
            Settings::default(),
        );
        engine.recover().await.unwrap();
        let mut config = Config::default();
        config.server.api_key = Some(Secret::new("k"));
        let store = Arc::new(ImageStore::open(dir.path()).unwrap());
        let images = Images { store, uploads: std::env::temp_dir(), in_use: Arc::new(Default::default) };
        let app = App::new(Arc::new(config), engine, images, Keyring::single(Some("k")));
        Self { router: router::build(app).into_router(), _dir: dir }
    }

    async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Seen {
        let mut request = Request::builder().method(method).uri(path).header("host", "example.test:8080");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response =
            self.router.clone().oneshot(request.body(Body::from(body.to_owned())).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let text = String::from_utf8(to_bytes(body, 4 << 20).await.unwrap().to_vec()).unwrap();
        Seen { status: parts.status, headers: parts.headers, text }
    }

    /// With the key and, when there is a body, as JSON.
    async fn call(&self, method: &str, path: &str, body: Value) -> Seen {
        let (body, headers) = match body {
            Value::Null => (String::new(), vec![(KEY, "k")]),
            value => (value.to_string(), vec![(KEY, "k"), ("content-type", "application/json")]),
        };
        self.send(method, path, &headers, &body).await
    }
}

/// A path of a route with something in each of its places.
fn paths(route: &Route) -> impl Iterator<Item = String> + '_ {
    route.paths().map(|path| {
        path.split('/')
            .map(|segment| match segment {
                "{port}" => "8000",
                segment if segment.starts_with('{') => "x",
                segment => segment,
            })
            .collect::<Vec<_>>()
            .join("/")
    })
}

#[tokio::test(start_paused = true)]
async fn every_route_exists_and_needs_the_key_unless_it_says_otherwise() {
    let edge = Edge::new().await;
    for route in ROUTES {
        for path in paths(route) {
            for (headers, code) in [(&[][..], "MISSING_API_KEY"), (&[(KEY, "wrong")][..], "INVALID_API_KEY")]
            {
                let seen = edge.send(route.method, &path, headers, "").await;
                assert_eq!(seen.header("x-request-id").len(), 32, "{} {path}", route.method);
                if route.needs_auth {
                    assert_eq!(seen.status, 401, "{} {path}", route.method);
                    // Ports of sandboxes also open to the sandbox's token, so their refusal may say so.
                    let body = seen.json();
                    assert!(
                        body["code"] == code || path.contains("/proxy/"),
                        "{} {path}: {body}",
                        route.method
                    );
                    assert!(body["message"].is_string());
                } else if route.method == "GET" {
                    assert_eq!(seen.status, 200, "{} {path}", route.method);
                } else {
                    // Pushes are signed; this server has nobody to tell of them.
                    assert_eq!(seen.json()["code"], "IMAGE_BUILD::UNAVAILABLE", "{} {path}", route.method);
                }
            }
            let seen = edge.call(route.method, &path, Value::Null).await;
            assert_ne!(seen.status, 401, "{} {path}", route.method);
            assert_ne!(seen.status, 405, "{} {path}", route.method);
            if seen.status == 404 {
                assert_ne!(seen.json()["code"], "GENERAL::NOT_FOUND", "{} {path}", route.method);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_method_that_a_path_lacks_is_405_and_says_which_it_has() {
    let edge = Edge::new().await;
    for (method, path, allow) in [
        ("PUT", "/v1/sandboxes", "POST, GET"),
        ("HEAD", "/sandboxes/x", "GET, DELETE"),
        ("OPTIONS", "/v1/snapshots", "GET"),
        ("GET", "/v1/metrics/events", "POST"),
        ("POST", "/health", "GET"),
        ("HEAD", "/docs", "GET"),
    ] {
        let seen = edge.call(method, path, Value::Null).await;
        assert_eq!((seen.status.as_u16(), seen.header("allow")), (405, allow), "{method} {path}");
        if method != "HEAD" {
            assert_eq!(seen.json()["detail"], "Method Not Allowed");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn paths_that_only_look_like_routes_are_404() {
    let edge = Edge::new().await;
    for path in ["/metrics/events", "/v1/health", "/v1/docs", "/healthzzz", "/nothing/", "/images"] {
        let seen = edge.call("GET", path, Value::Null).await;
        assert_eq!(
            (seen.status.as_u16(), seen.json()["code"].as_str()),
            (404, Some("GENERAL::NOT_FOUND")),
            "{path}"
        );
        assert_eq!(seen.json()["detail"], "Not Found");
    }
    let seen = edge.call("GET", "/v1/sandboxes/?page=1", Value::Null).await;
    assert_eq!(
        (seen.status.as_u16(), seen.header("location")),
        (307, "http://example.test:8080/v1/sandboxes?page=1")
    );
}

#[tokio::test(start_paused = true)]
async fn what_the_runtime_lacks_is_validated_and_then_refused_with_its_code() {
    let edge = Edge::new().await;
    let pool = json!({"name": "p", "template": {}, "capacitySpec": {"bufferMax": 1, "bufferMin": "0", "pool_max": 1.0, "poolMin": 0}});
    let template = json!({"image": "i", "publish": "p"});
    let unchecked = json!({"image": "i", "publish": "p", "extra": 1});
    for (method, path, body, status, code) in [
        ("POST", "/pools", json!({}), 422, "GENERAL::VALIDATION_ERROR"),
        ("POST", "/v1/pools", pool, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("GET", "/pools", Value::Null, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("PUT", "/pools/p", json!({"capacitySpec": {}}), 422, "GENERAL::VALIDATION_ERROR"),
        ("DELETE", "/pools/p", Value::Null, 501, "KUBERNETES::POOL_NOT_SUPPORTED"),
        ("POST", "/templates", unchecked, 422, "GENERAL::VALIDATION_ERROR"),
        ("POST", "/templates", template, 501, "FSB::API_NOT_SUPPORTED"),
        ("GET", "/templates/t", Value::Null, 501, "FSB::API_NOT_SUPPORTED"),
        ("GET", "/snapshots/s", Value::Null, 404, "SNAPSHOT::NOT_FOUND"),
        ("DELETE", "/snapshots/s", Value::Null, 404, "SNAPSHOT::NOT_FOUND"),
        ("GET", "/snapshots?page=0", Value::Null, 422, "GENERAL::VALIDATION_ERROR"),
        ("POST", "/sandboxes/x/snapshots", json!({"name": ""}), 422, "GENERAL::VALIDATION_ERROR"),
        ("POST", "/sandboxes/x/snapshots", Value::Null, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("PUT", "/sandboxes/x/networkpolicy", json!([]), 422, "GENERAL::VALIDATION_ERROR"),
        ("DELETE", "/sandboxes/x/networkpolicy", Value::Null, 422, "GENERAL::VALIDATION_ERROR"),
        (
            "PATCH",
            "/sandboxes/x/networkpolicy",
            json!([{"action": "allow", "target": "a"}]),
            404,
            "DOCKER::SANDBOX_NOT_FOUND",
        ),
        ("GET", "/sandboxes/x", Value::Null, 404, "DOCKER::SANDBOX_NOT_FOUND"),
        ("GET", "/sandboxes/x/endpoints/a", Value::Null, 422, "GENERAL::VALIDATION_ERROR"),
        ("GET", "/sandboxes/x/endpoints/0", Value::Null, 400, "DOCKER::INVALID_PORT"),
        ("GET", "/sandboxes/x/endpoints/80?expires=9", Value::Null, 400, "SANDBOX::API_NOT_SUPPORTED"),
        (
            "GET",
            "/sandboxes/x/endpoints/80?expires=9&use_server_proxy=on",
            Value::Null,
            400,
            "SANDBOX::INVALID_PARAMETER",
        ),
        (
            "POST",
            "/sandboxes/x/renew-expiration",
            json!({"expiresAt": "soon"}),
            422,
            "GENERAL::VALIDATION_ERROR",
        ),
        (
            "PATCH",
            "/sandboxes/x/metadata",
            json!({"opensandbox.io/id": null}),
            404,
            "DOCKER::SANDBOX_NOT_FOUND",
        ),
        ("GET", "/sandboxes?metadata=a", Value::Null, 400, "INVALID_METADATA_FORMAT"),
        ("GET", "/sandboxes/x/diagnostics/logs?scope=no", Value::Null, 400, "DIAGNOSTICS_SCOPE_UNSUPPORTED"),
        (
            "POST",
            "/v1/metrics/events",
            json!({"eventType": "other", "createDurationMs": 1, "success": true}),
            422,
            "GENERAL::VALIDATION_ERROR",
        ),
    ] {
        let seen = edge.call(method, path, body.clone()).await;
        assert_eq!(
            (seen.status.as_u16(), seen.json()["code"].as_str()),
            (status, Some(code)),
            "{method} {path} {body}"
        );
        assert_eq!(seen.json().get("detail").is_some(), status == 422, "{method} {path}");
    }
    let event = json!({"event_type": "sandbox.create", "create_duration_ms": "12", "success": 1});
    let seen = edge.call("POST", "/v1/metrics/events", event).await;
    assert_eq!((seen.status.as_u16(), seen.text.as_str()), (204, ""));
    let seen = edge.call("GET", "/snapshots", Value::Null).await;
    assert_eq!((seen.status.as_u16(), seen.json()["pagination"]["totalPages"].as_u64()), (200, Some(0)));
}

#[tokio::test(start_paused = true)]
async fn a_refused_body_is_not_repeated() {
    let edge = Edge::new().await;
    let body = json!({"image": {"uri": "x", "auth": {"username": "u", "password": "hunter2"}}, "timeout": "hunter2"});
    let seen = edge.call("POST", "/v1/sandboxes", body).await;
    assert_eq!(seen.status, 422);
    assert!(!seen.text.contains("hunter2"));
    let form = edge
        .send(
            "POST",
            "/sandboxes",
            &[(KEY, "k"), ("content-type", "application/x-www-form-urlencoded")],
            "{}",
        )
        .await;
    assert_eq!(form.json()["detail"][0]["type"], "model_attributes_type");
}

#[tokio::test(start_paused = true)]
async fn a_create_echoes_what_was_sent() {
    let edge = Edge::new().await;
    let body = json!({
        "image": {"uri": "img", "auth": {"username": "u", "password": "p"}}, "entrypoint": ["sleep 1d"], "resourceLimits": {},
        "timeout": 60, "metadata": {}, "extensions": {"opensandbox.extensions.a": "b", "other": "c"},
    });
    let made = edge.call("POST", "/v1/sandboxes", body).await;
    assert_eq!(made.status, 202, "{}", made.text);
    let made = made.json();
    assert_eq!(made["entrypoint"], json!(["sleep 1d"]));
    assert_eq!(made["metadata"], json!({}));
    assert_eq!(made["extensions"], json!({"opensandbox.extensions.a": "b"}));
    let read =
        edge.call("GET", &format!("/sandboxes/{}", made["id"].as_str().unwrap()), Value::Null).await.json();
    assert_eq!(read["entrypoint"], json!(["sleep", "1d"]));
    assert_eq!(read["image"], json!({"uri": "img"}));
    assert!(!read.to_string().contains("null") && read.get("metadata").is_none());
}

#[tokio::test(start_paused = true)]
async fn the_documents_load_nothing_from_elsewhere() {
    let edge = Edge::new().await;
    let seen = edge.send("GET", "/openapi.json", &[], "").await;
    assert_eq!(seen.json()["openapi"], "3.1.0");
    for path in ["/docs", "/redoc"] {
        let page = edge.send("GET", path, &[], "").await;
        assert!(page.header("content-type").starts_with("text/html"));
        for outside in ["src=", "<link", "@import", "url(", "https://"] {
            assert!(!page.text.contains(outside), "{path}: {outside}");
        }
    }
}
