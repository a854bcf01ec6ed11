//! Several tenants on one server: what is one's does not exist for the others, on every route there is.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use async_trait::async_trait;
use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::Request;
use sandglass_api::routes::ROUTES;
use sandglass_images::ImageStore;
use sandglass_sandbox::ports::{
    RuntimeErrorKind,
    runtime::{RuntimeError, RuntimeEvent},
};
use sandglass_server::{
    config::Config,
    engine::{Engine, Settings},
    http::{App, images::Images, router},
    tenants::{Keyring, ProviderUnavailable, Tenant, TenantProvider},
};
use sandglass_testkit::{FakeRuntime, ManualClock, MemoryStore};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
};
use tower::ServiceExt;

const KEY: &str = "open-sandbox-api-key";
/// No sandbox has this id.
const NOBODYS: &str = "00000000-0000-4000-8000-000000000000";

/// `key-<name>` is the key of the tenant of that name; both share a namespace.
#[derive(Default)]
struct Directory {
    down: Mutex<bool>,
}

#[async_trait]
impl TenantProvider for Directory {
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
        if *self.down.lock().unwrap() {
            return Err(ProviderUnavailable);
        }
        let name = match key {
            b"key-a" => "a",
            b"key-b" => "b",
            _ => return Ok(None),
        };
        Ok(Some(Arc::new(Tenant { name: name.to_owned(), namespace: format!("of-{name}") })))
    }
}

struct Stage {
    /// With tenants.
    shared: Router,
    /// The same engine without any, as it was before there were tenants.
    alone: Router,
    runtime: Arc<FakeRuntime>,
    directory: Arc<Directory>,
    _dir: tempfile::TempDir,
}

#[derive(Debug, PartialEq)]
struct Seen {
    status: u16,
    text: String,
}

impl Seen {
    fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|_| panic!("{self:?}"))
    }

    fn code(&self) -> String {
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }
}

impl Stage {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Arc::<FakeRuntime>::default();
        let engine = Engine::new(
            runtime.clone(),
            Arc::<MemoryStore>::default(),
            Arc::<ManualClock>::default(),
            Settings::default(),
        );
        engine.recover().await.unwrap();
        let directory = Arc::<Directory>::default();
        let store = Arc::new(ImageStore::open(dir.path()).unwrap());
        let app = |keys| {
            let images = Images {
                store: Arc::clone(&store),
                uploads: std::env::temp_dir(),
                in_use: Arc::new(Default::default),
            };
            App::new(Arc::new(Config::default()), engine.clone(), images, keys)
        };
        Self {
            shared: router::build(app(Keyring::tenants(directory.clone()))).into_router(),
            alone: router::build(app(Keyring::single(None))).into_router(),
            runtime,
            directory,
            _dir: dir,
        }
    }

    async fn send(
        router: &Router,
        (method, path): (&str, &str),
        headers: &[(&str, &str)],
        body: &Value,
    ) -> Seen {
        let mut request = Request::builder().method(method).uri(path).header("host", "example.test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = match body {
            Value::Null => Body::empty(),
            body => {
                request = request.header("content-type", "application/json");
                Body::from(body.to_string())
            }
        };
        let response = router.clone().oneshot(request.body(body).unwrap()).await.unwrap();
        let (parts, body) = response.into_parts();
        let text = String::from_utf8(to_bytes(body, 4 << 20).await.unwrap().to_vec()).unwrap();
        Seen { status: parts.status.as_u16(), text }
    }

    /// By the tenant of this name.
    async fn by(&self, tenant: &str, method: &str, path: &str, body: Value) -> Seen {
        let key = format!("key-{tenant}");
        Self::send(&self.shared, (method, path), &[(KEY, &key)], &body).await
    }

    async fn create(&self, tenant: &str) -> String {
        let made = self.by(tenant, "POST", "/v1/sandboxes", new()).await;
        assert_eq!(made.status, 202, "{made:?}");
        made.json()["id"].as_str().unwrap().to_owned()
    }
}

fn new() -> Value {
    json!({"image": {"uri": "img"}, "entrypoint": ["x"], "resourceLimits": {}, "timeout": 3600})
}

/// A body that passes the checks which come before the sandbox is looked for.
fn body_for(method: &str, path: &str) -> Value {
    match (method, path.rsplit('/').next().unwrap()) {
        ("PATCH", "metadata") => json!({"a": "b"}),
        ("POST", "renew-expiration") => json!({"expiresAt": "2035-01-01T00:00:00Z"}),
        ("POST", "activity") => json!({"leaseSeconds": 60}),
        ("PUT", "app") => json!({"enabled": true}),
        ("PUT", "networkpolicy") => json!({"egress": []}),
        ("PATCH", "networkpolicy") => json!([{"action": "allow", "target": "a.test"}]),
        ("DELETE", "networkpolicy") => json!(["a.test"]),
        _ => Value::Null,
    }
}

const OF_A_SANDBOX: &str = "/sandboxes/{sandbox_id}";

/// A path with something in each of its places but the id of the sandbox.
fn filled(path: &str) -> String {
    path.replace("{sandbox_id}", "{id}")
        .replace("{port}", "9")
        .replace("{name}", "app")
        .replace("{*full_path}", "x")
}

/// Every method and path about one sandbox, with the id left out.
fn routes_of_a_sandbox() -> Vec<(&'static str, String)> {
    let routes = ROUTES.iter().filter(|route| route.path.starts_with(OF_A_SANDBOX));
    let all: Vec<_> =
        routes.flat_map(|route| route.paths().map(|path| (route.method, filled(&path)))).collect();
    assert!(all.len() > 40, "{all:?}");
    all
}

#[tokio::test(start_paused = true)]
async fn on_every_route_anothers_sandbox_is_one_that_does_not_exist() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let before = Stage::send(&stage.alone, ("POST", "/sandboxes"), &[], &new()).await.json();
    let unmarked = before["id"].as_str().unwrap();
    for (method, path) in routes_of_a_sandbox() {
        let of = |id: &str| path.replace("{id}", id);
        let body = body_for(method, &path);
        let absent = stage.by("b", method, &of(NOBODYS), body.clone()).await;
        assert_eq!(
            (absent.status, absent.code().as_str()),
            (404, "DOCKER::SANDBOX_NOT_FOUND"),
            "{method} {path}"
        );
        for hidden in [id.as_str(), unmarked] {
            let seen = stage.by("b", method, &of(hidden), body.clone()).await;
            assert_eq!(seen, absent, "{method} {path}");
        }
    }
    // None of that did anything to it.
    let seen = stage.by("a", "GET", &format!("/sandboxes/{id}"), Value::Null).await.json();
    assert_eq!(seen["status"]["state"], "Running");
    assert_eq!(seen.get("metadata"), None);
    assert_eq!(stage.runtime.boxes().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn on_every_route_ones_own_sandbox_is_there() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let mut routes = routes_of_a_sandbox();
    // Its end comes last, and the pauses are between resumes.
    routes.sort_by_key(|(method, path)| *method == "DELETE" && path.ends_with("{id}"));
    for (method, path) in routes {
        if path.ends_with("/resume") {
            stage.by("a", "POST", &format!("/sandboxes/{id}/pause"), Value::Null).await;
        }
        let seen = stage.by("a", method, &path.replace("{id}", &id), body_for(method, &path)).await;
        if path.ends_with("/pause") {
            stage.by("a", "POST", &format!("/sandboxes/{id}/resume"), Value::Null).await;
        }
        if method == "DELETE" && path == "/v1/sandboxes/{id}" {
            assert_eq!(seen.status, 404, "it was deleted under the other mount");
        } else {
            // It is there, and has no services.
            let found = seen.status != 404 || seen.code() == "SERVICE::NOT_FOUND";
            assert!(seen.status != 401 && found, "{method} {path}: {seen:?}");
        }
    }
    assert_eq!(stage.runtime.boxes(), []);
}

#[tokio::test(start_paused = true)]
async fn lists_hold_ones_own_and_the_operator_sees_all() {
    let stage = Stage::new().await;
    let (a, b) = (stage.create("a").await, stage.create("b").await);
    Stage::send(&stage.alone, ("POST", "/sandboxes"), &[], &new()).await;
    for (tenant, own) in [("a", &a), ("b", &b)] {
        let seen = stage.by(tenant, "GET", "/v1/sandboxes?pageSize=1", Value::Null).await.json();
        assert_eq!(seen["items"][0]["id"], **own);
        assert_eq!(
            (&seen["pagination"]["totalItems"], &seen["pagination"]["totalPages"]),
            (&json!(1), &json!(1))
        );
        let snapshots = stage.by(tenant, "GET", "/v1/snapshots", Value::Null).await.json();
        assert_eq!(snapshots["pagination"]["totalItems"], 0);
    }
    let all = Stage::send(&stage.alone, ("GET", "/sandboxes"), &[], &Value::Null).await.json();
    assert_eq!(all["pagination"]["totalItems"], 3);
}

#[tokio::test(start_paused = true)]
async fn snapshots_are_the_namespaces_own() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let made = stage.by("a", "POST", &format!("/sandboxes/{id}/snapshots"), Value::Null).await;
    if made.status == 501 {
        // This version takes none.
        return;
    }
    assert_eq!(made.status, 202, "{made:?}");
    let snapshot = made.json()["id"].as_str().unwrap().to_owned();
    let path = format!("/v1/snapshots/{snapshot}");
    let restore = json!({"snapshotId": snapshot, "resourceLimits": {}, "timeout": 3600});
    for (method, path, body) in [
        ("GET", path.as_str(), Value::Null),
        ("DELETE", &path, Value::Null),
        ("POST", "/v1/sandboxes", restore),
    ] {
        let seen = stage.by("b", method, path, body).await;
        assert_eq!((seen.status, seen.code().as_str()), (404, "SNAPSHOT::NOT_FOUND"), "{method} {path}");
    }
    let total = |seen: Seen| seen.json()["pagination"]["totalItems"].clone();
    assert_eq!(total(stage.by("b", "GET", "/snapshots", Value::Null).await), 0);
    assert_eq!(total(stage.by("a", "GET", "/snapshots", Value::Null).await), 1);
    assert_eq!(stage.by("a", "GET", &path, Value::Null).await.status, 200);
}

#[tokio::test(start_paused = true)]
async fn idempotency_keys_of_tenants_do_not_meet() {
    let stage = Stage::new().await;
    let create = async |tenant: &str, body: &Value| {
        let key = format!("key-{tenant}");
        Stage::send(&stage.shared, ("POST", "/sandboxes"), &[(KEY, &key), ("idempotency-key", "same")], body)
            .await
    };
    let (first, other) =
        (new(), json!({"image": {"uri": "other"}, "entrypoint": ["y"], "resourceLimits": {}}));
    let a = create("a", &first).await.json()["id"].clone();
    let b = create("b", &other).await.json()["id"].clone();
    assert_ne!(a, b);
    assert_eq!(create("a", &first).await.json()["id"], a);
    assert_eq!(create("b", &other).await.json()["id"], b);
    assert_eq!(create("b", &first).await.code(), "GENERAL::IDEMPOTENCY_KEY_REUSED");
}

#[tokio::test(start_paused = true)]
async fn what_is_the_servers_own_is_not_for_tenants() {
    let stage = Stage::new().await;
    let of_the_server = |path: &str| {
        ["/images", "/ingress", "/pools"].iter().any(|own| path.starts_with(own)) || path == "/metrics"
    };
    // Built images are their tenants', and share the paths of the local ones.
    let built = ["get_image", "move_image_tag"];
    let of_the_server =
        ROUTES.iter().filter(|route| of_the_server(route.path) && !built.contains(&route.operation));
    for route in of_the_server {
        for path in route.paths() {
            let path = path.replace("{reference}", "x");
            let path = if route.operation == "list_images" { format!("{path}?kind=local") } else { path };
            let seen = stage.by("a", route.method, &path, Value::Null).await;
            assert_eq!(
                (seen.status, seen.code().as_str()),
                (403, "GENERAL::FORBIDDEN"),
                "{} {path}",
                route.method
            );
        }
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_valid_key_nothing_answers_and_it_is_said_why() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let needing = || ROUTES.iter().filter(|route| route.needs_auth);
    for (down, headers, status, code) in [
        (false, &[][..], 401, "MISSING_API_KEY"),
        (false, &[(KEY, "key-c")], 401, "INVALID_API_KEY"),
        (false, &[(KEY, "")], 401, "INVALID_API_KEY"),
        (true, &[], 401, "MISSING_API_KEY"),
        (true, &[(KEY, "key-a")], 503, "TENANT_PROVIDER_UNAVAILABLE"),
    ] {
        *stage.directory.down.lock().unwrap() = down;
        for route in needing() {
            for path in route.paths() {
                let path = filled(&path).replace("{id}", &id);
                let seen = Stage::send(&stage.shared, (route.method, &path), headers, &Value::Null).await;
                assert_eq!((seen.status, seen.code().as_str()), (status, code), "{} {path}", route.method);
            }
        }
        let open = Stage::send(&stage.shared, ("GET", "/health"), headers, &Value::Null).await;
        assert_eq!(open.status, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn a_token_opens_its_own_sandbox_to_whoever_has_it() {
    let stage = Stage::new().await;
    let (a, b) = (stage.create("a").await, stage.create("b").await);
    let endpoint = format!("/sandboxes/{a}/endpoints/9?use_server_proxy=true");
    let headers = stage.by("a", "GET", &endpoint, Value::Null).await.json()["headers"].clone();
    let token = headers["X-Sandglass-Access"].as_str().unwrap();
    for (key, id, status) in [
        (None, &a, 502),
        (Some("key-b"), &a, 502),
        (Some("key-b"), &b, 502),
        (None, &b, 401),
        (Some("key-a"), &b, 404),
    ] {
        let mut headers = vec![("x-sandglass-access", token)];
        headers.extend(key.map(|key| (KEY, key)));
        let path = format!("/v1/sandboxes/{id}/proxy/9/x");
        let seen = Stage::send(&stage.shared, ("GET", &path), &headers, &Value::Null).await;
        // Nothing listens there: that the port was tried is enough.
        assert_eq!(seen.status, status, "{key:?} {seen:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_runtime_is_away_existence_is_told_to_the_owner_only() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let lost = RuntimeError::new(RuntimeErrorKind::Unavailable, "engine", "away");
    stage.runtime.tell(RuntimeEvent::Lost(lost));
    tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    for path in ["/sandboxes/{id}", "/sandboxes/{id}/endpoints/9", "/sandboxes/{id}/proxy/9/"] {
        let absent = stage.by("b", "GET", &path.replace("{id}", NOBODYS), Value::Null).await;
        let hidden = stage.by("b", "GET", &path.replace("{id}", &id), Value::Null).await;
        assert!(absent.status >= 500, "{path}: {absent:?}");
        assert_eq!(hidden, absent, "{path}");
    }
}

/// Sends a WebSocket handshake; returns the code of the close frame that follows.
async fn closed_with(api: SocketAddr, path: &str, headers: &str) -> u16 {
    let mut stream = TcpStream::connect(api).await.unwrap();
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: api.local\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
         Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n"
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut got = Vec::new();
    loop {
        let head = got.windows(4).position(|window| window == b"\r\n\r\n");
        if let Some(frame) = head.and_then(|end| got.get(end + 4..end + 8)) {
            assert!(got.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&got));
            assert_eq!(frame[0], 0x88, "a close frame");
            return u16::from_be_bytes([frame[2], frame[3]]);
        }
        assert_ne!(stream.read_buf(&mut got).await.unwrap(), 0, "{}", String::from_utf8_lossy(&got));
    }
}

#[tokio::test]
async fn websockets_are_closed_with_the_documented_codes() {
    let stage = Stage::new().await;
    let id = stage.create("a").await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
    let api = listener.local_addr().unwrap();
    let router = stage.shared.clone();
    tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
    let (own, none) =
        (format!("/v1/sandboxes/{id}/proxy/9/ws"), format!("/v1/sandboxes/{NOBODYS}/proxy/9/ws"));
    let key = |name: &str| format!("OPEN-SANDBOX-API-KEY: key-{name}\r\n");
    for (path, headers, code) in [
        (&own, String::new(), 1008),
        (&own, key("c"), 1008),
        (&none, String::new(), 1008),
        // It passes, and nothing listens there.
        (&own, key("a"), 1011),
        (&own, key("b"), 1011),
        (&none, key("b"), 1011),
    ] {
        assert_eq!(closed_with(api, path, &headers).await, code, "{path} {headers}");
    }
    *stage.directory.down.lock().unwrap() = true;
    assert_eq!(closed_with(api, &own, &key("a")).await, 1011, "the provider is down");
    assert_eq!(closed_with(api, &own, "").await, 1008);
}
