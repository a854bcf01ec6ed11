//! What the whole router counts, and who may read it.

use std::sync::Arc;

use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::{Request, StatusCode};
use sandglass_images::ImageStore;
use sandglass_sandbox::ports::{Store as _, StoreError};
use sandglass_server::{
    config::{Config, RenewIntentConfig, Secret},
    engine::{Engine, Settings},
    http::{App, images::Images, router},
    renewal::Renewals,
    telemetry::{
        CountedStore, Telemetry,
        metrics::{Metrics, RenewOutcome, RenewSource},
        traces::{Ended, Sampler, Tracer},
    },
    tenants::Keyring,
};
use sandglass_testkit::{FakeRuntime, Fault, ManualClock, MemoryStore};
use serde_json::json;
use tower::ServiceExt as _;

const KEY: (&str, &str) = ("open-sandbox-api-key", "k");

struct Stage {
    router: Router,
    runtime: Arc<FakeRuntime>,
    metrics: Arc<Metrics>,
    spans: tokio::sync::mpsc::Receiver<Ended>,
    _dir: tempfile::TempDir,
}

impl Stage {
    async fn new(open_metrics: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let runtime = Arc::<FakeRuntime>::default();
        let (store, clock) = (Arc::<MemoryStore>::default(), Arc::<ManualClock>::default());
        let engine = Engine::new(runtime.clone(), store, clock, Settings::default());
        let metrics = Arc::<Metrics>::default();
        let (queue, spans) = tokio::sync::mpsc::channel(64);
        let tracer = Tracer::new(queue, Sampler { follow_parent: true, ratio: 1.0 }, metrics.clone());
        let telemetry = Telemetry { metrics: metrics.clone(), tracer };
        let outcomes = metrics.clone();
        engine.on_created(move |failed| outcomes.count_create(failed));
        engine.recover().await.unwrap();
        let mut config = Config::default();
        config.server.api_key = Some(Secret::new("k"));
        config.server.open_metrics = open_metrics;
        let images = Images {
            store: Arc::new(ImageStore::open(dir.path()).unwrap()),
            uploads: std::env::temp_dir(),
            in_use: Arc::new(Default::default),
        };
        let renew = RenewIntentConfig { enabled: true, ..RenewIntentConfig::default() };
        let renewals = Renewals::start(&engine, &renew, metrics.clone()).unwrap().unwrap();
        let app = App::new(Arc::new(config), engine, images, Keyring::single(Some("k")));
        let app = app.with_telemetry(telemetry);
        app.renew_on_access(renewals);
        Self { router: router::build(app).into_router(), runtime, metrics, spans, _dir: dir }
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &str,
    ) -> (StatusCode, String) {
        let mut request = Request::builder().method(method).uri(path).header("host", "example.test");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Body::from(body.to_owned())).unwrap();
        let response = self.router.clone().oneshot(request).await.unwrap();
        let (parts, body) = response.into_parts();
        let text = String::from_utf8(to_bytes(body, 4 << 20).await.unwrap().to_vec()).unwrap();
        (parts.status, text)
    }

    async fn create(&self) -> (StatusCode, String) {
        let body = json!({
            "image": {"uri": "img"},
            "entrypoint": ["sleep", "1d"],
            "timeout": 60,
            "resourceLimits": {"cpu": "1", "memory": "64Mi"},
            "extensions": {"access.renew.extend.seconds": "600"},
        });
        let json = ("content-type", "application/json");
        self.send("POST", "/v1/sandboxes", &[KEY, json], &body.to_string()).await
    }

    async fn page(&self) -> String {
        let (status, page) = self.send("GET", "/metrics", &[KEY], "").await;
        assert_eq!(status, 200, "{page}");
        page
    }
}

#[tokio::test(start_paused = true)]
async fn the_page_needs_the_key_unless_it_is_opened() {
    let closed = Stage::new(false).await;
    assert_eq!(closed.send("GET", "/metrics", &[], "").await.0, 401);
    assert_eq!(closed.send("GET", "/v1/metrics", &[KEY], "").await.0, 404);
    assert_eq!(closed.send("POST", "/metrics", &[KEY], "").await.0, 405);
    let open = Stage::new(true).await;
    let (status, page) = open.send("GET", "/metrics", &[], "").await;
    assert_eq!(status, 200);
    assert!(page.contains("sandglass_runtime_reachable{runtime=\"fake\"} 1"), "{page}");
    assert_eq!(open.send("GET", "/v1/metrics", &[], "").await.0, 401);
    assert_eq!(open.send("GET", "/metrics/", &[], "").await.0, 401);
}

#[tokio::test(start_paused = true)]
async fn creates_sandboxes_and_reports_are_counted() {
    let stage = Stage::new(false).await;
    let (status, body) = stage.create().await;
    assert_eq!(status, 202, "{body}");
    stage.runtime.inject("start", Fault::Refuse);
    assert_ne!(stage.create().await.0, 202);
    let report = json!({"eventType": "sandbox.create", "createDurationMs": 300, "success": true});
    let headers =
        [KEY, ("content-type", "application/json"), ("user-agent", "OpenSandbox-Python-SDK/0.1.4 x")];
    assert_eq!(stage.send("POST", "/v1/metrics/events", &headers, &report.to_string()).await.0, 204);
    let page = stage.page().await;
    let sdk = "sdk_language=\"python\",sdk_version=\"0.1.4\",success=\"true\"";
    for line in [
        "sandglass_sandboxes{state=\"Running\"} 1",
        "sandglass_sandboxes{state=\"Paused\"} 0",
        "sandglass_intents_open 0",
        "sandglass_creates_total{outcome=\"running\",phase=\"\"} 1",
        "sandglass_creates_total{outcome=\"failed\",phase=\"start\"} 1",
        &format!("opensandbox_sandbox_create_duration_milliseconds_bucket{{{sdk},le=\"250\"}} 0"),
        &format!("opensandbox_sandbox_create_duration_milliseconds_bucket{{{sdk},le=\"500\"}} 1"),
        "server_http_request_duration_milliseconds_count{http_method=\"POST\",http_route=\"/v1/sandboxes\",http_status_code=\"202\"} 1",
    ] {
        assert!(page.lines().any(|l| l == line), "{line}\n{page}");
    }
    // A page that Prometheus can read: every line is a comment or a name with a number.
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (_, value) = line.rsplit_once(' ').unwrap();
        assert!(value.parse::<f64>().is_ok(), "{line}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_phases_of_a_create_are_spans_below_its_request() {
    let mut stage = Stage::new(false).await;
    stage.create().await;
    stage.runtime.inject("start", Fault::Refuse);
    stage.create().await;
    let spans: Vec<Ended> = std::iter::from_fn(|| stage.spans.try_recv().ok()).collect();
    let names: Vec<&str> = spans.iter().map(|span| &*span.name).collect();
    let one = ["sandbox.prepare", "sandbox.start", "POST /v1/sandboxes"];
    assert_eq!(names, [one, one].concat());
    for create in spans.chunks(3) {
        let request = create[2].context;
        assert!(create[..2].iter().all(|phase| phase.parent == Some(request.span_id)));
        assert!(create.iter().all(|span| span.context.trace_id == request.trace_id));
    }
    assert_ne!(spans[0].context.trace_id, spans[3].context.trace_id);
    let failed: Vec<bool> = spans.iter().map(|span| span.failure.is_some()).collect();
    assert_eq!(failed, [false, false, false, false, true, true]);
}

#[tokio::test(start_paused = true)]
async fn policy_calls_are_use_and_a_header_says_when_they_are_not() {
    let stage = Stage::new(false).await;
    let (_, body) = stage.create().await;
    let created: serde_json::Value = serde_json::from_str(&body).unwrap();
    let id = created["id"].as_str().unwrap();
    let policy = format!("/v1/sandboxes/{id}/networkpolicy");
    let renewed = async || {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        stage.metrics.renewals(RenewSource::Proxy, RenewOutcome::Renewed)
    };
    stage.send("GET", &policy, &[], "").await;
    stage.send("GET", &policy, &[KEY, ("opensandbox-access-renew", "skip")], "").await;
    stage.send("POST", &policy, &[KEY], "").await;
    stage.send("GET", &format!("/v1/sandboxes/{id}"), &[KEY], "").await;
    assert_eq!(renewed().await, 0);
    stage.send("GET", &policy, &[KEY, ("opensandbox-access-renew", "no")], "").await;
    assert_eq!(renewed().await, 1);

    // Through the proxy: refused without the key, counted with it even though nothing listens there.
    let port = format!("/v1/sandboxes/{id}/proxy/1/");
    assert_eq!(stage.send("GET", &port, &[], "").await.0, 401);
    let page = stage.page().await;
    assert!(page.contains("sandglass_proxy_requests_total{kind=\"http\",outcome=\"refused\"} 1"), "{page}");
}

#[tokio::test]
async fn errors_of_the_store_are_counted() {
    let metrics = Arc::<Metrics>::default();
    let inner = Arc::<MemoryStore>::default();
    let store = CountedStore::new(inner.clone(), metrics.clone());
    assert!(store.open_intents().await.is_ok());
    inner.refuse_writes(1);
    let id = sandglass_sandbox::SandboxId::random();
    assert!(matches!(store.close(id, 1, &[]).await, Err(StoreError::Unavailable(_))));
    let page = sandglass_server::telemetry::metrics::prometheus::page(&metrics.families(None));
    assert!(page.contains("sandglass_store_errors_total{kind=\"unavailable\"} 1"), "{page}");
}
