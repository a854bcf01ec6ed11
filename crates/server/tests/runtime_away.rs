//! What clients are told while the runtime cannot be reached, and what a runtime refuses before anything is accepted.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::Request;
use sandglass_sandbox::ports::{
    RuntimeErrorKind,
    runtime::{RuntimeError, RuntimeEvent},
};
use sandglass_server::{
    config::{Config, RuntimeKind},
    engine::{Engine, Settings},
    http::{App, router},
    tenants::Keyring,
};
use sandglass_testkit::{FakeRuntime, Fault, ManualClock, MemoryStore};
use serde_json::{Value, json};
use tower::ServiceExt;

struct Server {
    runtime: Arc<FakeRuntime>,
    engine: Arc<Engine>,
    router: Router,
}

impl Server {
    async fn new(kind: RuntimeKind) -> Self {
        let runtime = Arc::<FakeRuntime>::default();
        let store = Arc::<MemoryStore>::default();
        let clock = Arc::<ManualClock>::default();
        let engine = Engine::new(runtime.clone(), store, clock, Settings::default());
        engine.recover().await.unwrap();
        let mut config = Config::default();
        config.runtime.kind = kind;
        config.docker.network_mode = "bridge".to_owned();
        config.egress.image = Some("egress".to_owned());
        let app = App::new(Arc::new(config), engine.clone(), None, Keyring::single(None));
        Self { runtime, engine, router: router::build(app).into_router() }
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let request = Request::builder().method(method).uri(path).header("host", "api.test");
        let request = match body {
            Value::Null => request.body(Body::empty()),
            body => request.header("content-type", "application/json").body(Body::from(body.to_string())),
        };
        let response = self.router.clone().oneshot(request.unwrap()).await.unwrap();
        let status = response.status().as_u16();
        let bytes = to_bytes(response.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&bytes).unwrap_or_default())
    }

    async fn code(&self, method: &str, path: &str, body: Value) -> (u16, String) {
        let (status, body) = self.call(method, path, body).await;
        (status, body["code"].as_str().unwrap_or_default().to_owned())
    }

    async fn sandbox(&self) -> String {
        let (status, made) = self.call("POST", "/v1/sandboxes", minimal()).await;
        assert_eq!(status, 202, "{made}");
        made["id"].as_str().unwrap().to_owned()
    }

    async fn tell(&self, event: RuntimeEvent) {
        let lost = matches!(event, RuntimeEvent::Lost(_));
        self.runtime.tell(event);
        while self.engine.reachable().is_err() != lost {
            tokio::task::yield_now().await;
        }
    }
}

fn minimal() -> Value {
    json!({"image": {"uri": "i"}, "entrypoint": ["x"], "resourceLimits": {}})
}

fn lost() -> RuntimeEvent {
    RuntimeEvent::Lost(RuntimeError::new(RuntimeErrorKind::Unavailable, "engine", "nobody answers"))
}

const UNKNOWN: &str = "00000000-0000-4000-8000-000000000000";

#[tokio::test(start_paused = true)]
async fn nothing_is_claimed_while_the_runtime_is_away() {
    let server = Server::new(RuntimeKind::Docker).await;
    let id = server.sandbox().await;
    // The list that is tried again meanwhile must not find it back.
    for _ in 0..100 {
        server.runtime.inject("list", Fault::Refuse);
    }
    server.tell(lost()).await;
    let away = (503, "DOCKER::SANDBOX_QUERY_FAILED".to_owned());
    for (method, path, body) in [
        ("GET", "/v1/sandboxes".to_owned(), Value::Null),
        ("GET", format!("/v1/sandboxes/{id}"), Value::Null),
        ("GET", format!("/v1/sandboxes/{UNKNOWN}"), Value::Null),
        ("DELETE", format!("/v1/sandboxes/{UNKNOWN}"), Value::Null),
        ("POST", format!("/v1/sandboxes/{UNKNOWN}/pause"), Value::Null),
        ("GET", format!("/v1/sandboxes/{UNKNOWN}/endpoints/80"), Value::Null),
        ("GET", format!("/v1/sandboxes/{UNKNOWN}/proxy/80/"), Value::Null),
    ] {
        assert_eq!(server.code(method, &path, body).await, away, "{method} {path}");
    }
    let made = server.code("POST", "/v1/sandboxes", minimal()).await;
    assert_eq!(made, (503, "DOCKER::SANDBOX_START_FAILED".to_owned()));
    assert_eq!(server.engine.index().len(), 1, "nothing was accepted");
    // What is known still leads to its sandbox.
    assert_eq!(server.call("GET", &format!("/v1/sandboxes/{id}/endpoints/80"), Value::Null).await.0, 200);
    assert_eq!(server.call("GET", "/readyz", Value::Null).await.0, 503);
    assert_eq!(server.call("GET", "/health", Value::Null).await.0, 200);

    server.tell(RuntimeEvent::Back).await;
    assert_eq!(server.call("GET", &format!("/v1/sandboxes/{id}"), Value::Null).await.0, 200);
    assert_eq!(server.call("GET", "/readyz", Value::Null).await.0, 200);
    assert_eq!(server.call("GET", &format!("/v1/sandboxes/{UNKNOWN}"), Value::Null).await.0, 404);
}

#[tokio::test(start_paused = true)]
async fn what_the_runtime_does_not_admit_is_not_accepted() {
    let server = Server::new(RuntimeKind::Docker).await;
    server.runtime.inject("admit", Fault::Refuse);
    let (status, body) = server.call("POST", "/v1/sandboxes", minimal()).await;
    assert!(status >= 400 && body["code"].is_string(), "{status} {body}");
    assert!(server.engine.index().is_empty());
    server.sandbox().await;
}

#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_answer_is_not_waited_for() {
    let server = Server::new(RuntimeKind::Docker).await;
    server.runtime.inject("admit", Fault::Slow(std::time::Duration::from_secs(3600)));
    let made = server.code("POST", "/v1/sandboxes", minimal()).await;
    assert_eq!(made, (503, "DOCKER::SANDBOX_START_FAILED".to_owned()));
    assert!(server.engine.index().is_empty());
}

#[tokio::test(start_paused = true)]
async fn policies_need_a_sandbox_that_was_given_one() {
    let answer = (400, "SANDBOX::API_NOT_SUPPORTED".to_owned());
    for kind in [RuntimeKind::Docker, RuntimeKind::Embedded] {
        let server = Server::new(kind).await;
        let path = format!("/v1/sandboxes/{}/networkpolicy", server.sandbox().await);
        for (method, body) in [
            ("GET", Value::Null),
            ("PUT", json!({"egress": []})),
            ("PATCH", json!([{"action": "allow", "target": "x"}])),
            ("DELETE", json!(["x"])),
        ] {
            assert_eq!(server.code(method, &path, body.clone()).await, answer, "{kind} {method}");
            if method != "GET" {
                // A malformed body is found before anything else.
                let nowhere = format!("/v1/sandboxes/{UNKNOWN}/networkpolicy");
                assert_eq!(server.call(method, &nowhere, json!("x")).await.0, 422, "{kind} {method}");
                assert_eq!(server.call(method, &nowhere, body).await.0, 404, "{kind} {method}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn images_are_the_engines_own_business() {
    let server = Server::new(RuntimeKind::Docker).await;
    for (method, path) in [("GET", "/v1/images"), ("POST", "/v1/images/prune"), ("DELETE", "/v1/images/x")] {
        let answer = server.code(method, path, Value::Null).await;
        assert_eq!(answer, (501, "SANDBOX::API_NOT_SUPPORTED".to_owned()), "{method} {path}");
    }
}

#[tokio::test(start_paused = true)]
async fn endpoints_of_docker_are_direct_and_unknown_while_pending() {
    let server = Server::new(RuntimeKind::Docker).await;
    let id = server.sandbox().await;
    let path = format!("/v1/sandboxes/{id}/endpoints/3000");
    let (status, answer) = server.call("GET", &path, Value::Null).await;
    assert_eq!((status, &answer["endpoint"]), (200, &json!("127.0.0.1:3000")));

    server.runtime.inject("start", Fault::Slow(std::time::Duration::from_secs(60)));
    let id = server.sandbox().await;
    let pending = server.code("GET", &format!("/v1/sandboxes/{id}/endpoints/3000"), Value::Null).await;
    assert_eq!(pending, (404, "KUBERNETES::POD_IP_NOT_AVAILABLE".to_owned()));
}
