//! Webhooks from end to end: a real store, real receivers over HTTP, and signatures that are checked by other code than what makes them.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Router,
    body::Bytes,
    body::to_bytes,
    extract::{Path, State},
};
use base64::{Engine as _, engine::general_purpose::STANDARD};
use http::{HeaderMap, Request, StatusCode};
use ring::hmac;
use sandglass_sandbox::{Clock, SandboxId, SystemClock, ports::Store};
use sandglass_server::{
    config::{Config, StoreConfig},
    engine::{Engine, Settings},
    http::{self as edge, App, router},
    store::SqlStore,
    tenants::Keyring,
    webhooks::Webhooks,
};
use sandglass_testkit::FakeRuntime;
use serde_json::{Value, json};
use tower::ServiceExt as _;

/// A request as a receiver got it.
#[derive(Clone, Debug)]
struct Got {
    headers: HeaderMap,
    raw: String,
    body: Value,
}

#[derive(Default)]
struct Receivers {
    got: Mutex<HashMap<String, Vec<Got>>>,
    /// Answers that are given before 200, by receiver; 0 never answers.
    answers: Mutex<HashMap<String, Vec<u16>>>,
}

async fn receive(
    State(all): State<Arc<Receivers>>,
    Path(name): Path<String>,
    headers: HeaderMap,
    body: Bytes,
) -> (StatusCode, [(&'static str, &'static str); 1]) {
    let raw = String::from_utf8(body.to_vec()).unwrap();
    let got = Got { headers, body: serde_json::from_str(&raw).unwrap(), raw };
    all.got.lock().unwrap().entry(name.clone()).or_default().push(got);
    let next = {
        let mut answers = all.answers.lock().unwrap();
        let queue = answers.entry(name).or_default();
        if queue.is_empty() { 200 } else { queue.remove(0) }
    };
    if next == 0 {
        std::future::pending::<()>().await;
    }
    (StatusCode::from_u16(next).unwrap(), [("location", "/elsewhere")])
}

struct Stage {
    runtime: Arc<FakeRuntime>,
    dir: tempfile::TempDir,
    config: Config,
    receivers: Arc<Receivers>,
    /// Where the receivers are.
    base: String,
    running: Option<(Arc<Engine>, Webhooks, Router, SqlStore)>,
}

impl Stage {
    async fn new() -> Self {
        let receivers = Arc::<Receivers>::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let base = format!("http://{}", listener.local_addr().unwrap());
        let app = Router::new().route("/{name}", axum::routing::post(receive)).with_state(receivers.clone());
        tokio::spawn(async move { axum::serve(listener, app).await });
        let dir = tempfile::tempdir().unwrap();
        let store = StoreConfig { path: dir.path().join("s.db"), ..StoreConfig::default() };
        let config = Config { store, ..Config::default() };
        let mut stage = Self { runtime: Arc::default(), dir, config, receivers, base, running: None };
        stage.start().await;
        stage
    }

    async fn start(&mut self) {
        let store = SqlStore::open(&self.config.store).await.unwrap();
        let clock: Arc<dyn Clock> = Arc::new(SystemClock);
        let rows: Arc<dyn Store> = Arc::new(store.clone());
        let engine = Engine::new(self.runtime.clone(), rows, clock.clone(), Settings::default());
        let at = clock.clone();
        engine.describe_with(move |entry| edge::describe(entry, None, at.now()));
        engine.recover().await.unwrap();
        let webhooks = Webhooks::start(&self.config, &store, &engine, clock).unwrap();
        let app = App::new(Arc::new(self.config.clone()), engine.clone(), None, Keyring::single(None));
        let app = app.with_webhooks(Some(webhooks.clone()));
        self.running = Some((engine, webhooks, router::build(app).into_router(), store));
    }

    /// The server ends, in order.
    async fn stop(&mut self) {
        let (engine, webhooks, _, store) = self.running.take().unwrap();
        engine.stop().await;
        webhooks.couriers.stop().await;
        store.shut().await;
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> (u16, Value) {
        let router = self.running.as_ref().unwrap().2.clone();
        let body = if body.is_null() { String::new() } else { body.to_string() };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header("host", "h")
            .header("content-type", "application/json");
        let answer = router.oneshot(request.body(axum::body::Body::from(body)).unwrap()).await.unwrap();
        let status = answer.status().as_u16();
        let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }

    async fn subscribe(&self, receiver: &str, more: Value) -> Value {
        let mut body = json!({"url": format!("{}/{receiver}", self.base)});
        body.as_object_mut().unwrap().extend(more.as_object().cloned().unwrap_or_default());
        let (status, made) = self.call("POST", "/v1/webhooks", body).await;
        assert_eq!(status, 201, "{made}");
        made
    }

    async fn create(&self, metadata: Value) -> String {
        let body = json!({"image": {"uri": "a"}, "entrypoint": ["x"], "timeout": 600, "metadata": metadata,
            "resourceLimits": {"cpu": "1", "memory": "64Mi"}});
        let (status, made) = self.call("POST", "/v1/sandboxes", body).await;
        assert_eq!(status, 202, "{made}");
        made["id"].as_str().unwrap().to_owned()
    }

    async fn delete(&self, id: &str) {
        assert_eq!(self.call("DELETE", &format!("/v1/sandboxes/{id}"), Value::Null).await.0, 204);
    }

    fn got(&self, receiver: &str) -> Vec<Got> {
        self.receivers.got.lock().unwrap().get(receiver).cloned().unwrap_or_default()
    }

    fn answers(&self, receiver: &str, answers: &[u16]) {
        self.receivers.answers.lock().unwrap().insert(receiver.into(), answers.to_vec());
    }

    async fn until(&self, receiver: &str, what: &str, holds: impl Fn(&[Got]) -> bool) -> Vec<Got> {
        let waited = async {
            loop {
                let got = self.got(receiver);
                if holds(&got) {
                    return got;
                }
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        let waited = tokio::time::timeout(Duration::from_secs(60), waited).await;
        waited.unwrap_or_else(|_| panic!("never: {what}; {:?}", types(&self.got(receiver))))
    }
}

fn types(got: &[Got]) -> Vec<String> {
    got.iter().map(|one| one.body["type"].as_str().unwrap().to_owned()).collect()
}

fn ended(got: &[Got]) -> bool {
    got.last().is_some_and(|one| one.body["type"] == "sandbox.terminated")
}

fn header<'a>(got: &'a Got, name: &str) -> &'a str {
    got.headers[name].to_str().unwrap()
}

/// By the specification, with the HMAC of another library.
fn verified(got: &Got, secret: &str) -> bool {
    let key = STANDARD.decode(secret.strip_prefix("whsec_").unwrap()).unwrap();
    let key = hmac::Key::new(hmac::HMAC_SHA256, &key);
    let signed = format!("{}.{}.{}", header(got, "webhook-id"), header(got, "webhook-timestamp"), got.raw);
    header(got, "webhook-signature").split(' ').any(|signature| {
        let tag = signature.strip_prefix("v1,").and_then(|text| STANDARD.decode(text).ok());
        tag.is_some_and(|tag| hmac::verify(&key, signed.as_bytes(), &tag).is_ok())
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_life_is_told_in_order_and_signed() {
    let mut stage = Stage::new().await;
    let hook = stage.subscribe("r", json!({})).await;
    let secret = hook["secret"].as_str().unwrap().to_owned();
    stage.answers("r", &[500, 302]);
    let id = stage.create(json!({"team": "a"})).await;
    stage.delete(&id).await;
    let got = stage.until("r", "the end", ended).await;
    let (_, page) = stage.call("GET", &format!("/v1/sandboxes/{id}/events"), Value::Null).await;
    let items = page["items"].as_array().unwrap();
    let told: Vec<_> = got[2..]
        .iter()
        .map(|one| (one.body["seq"].clone(), one.body["type"].clone(), one.body["data"].clone()))
        .collect();
    let kept: Vec<_> =
        items.iter().map(|one| (one["seq"].clone(), one["type"].clone(), one["data"].clone())).collect();
    assert_eq!(told, kept, "what the stream tells, in its order");
    for one in &got {
        assert!(verified(one, &secret) && !verified(one, &format!("whsec_{}", STANDARD.encode([1; 32]))));
        assert_eq!(one.body["sandboxId"], json!(id));
        assert_eq!(one.body["metadata"], json!({"team": "a"}), "also of one that is gone");
        assert_eq!(header(one, "content-type"), "application/json");
    }
    assert_eq!(header(&got[0], "webhook-id"), header(&got[1], "webhook-id"));
    assert_eq!(got[0].raw, got[2].raw, "tried again, the same");
    let list = format!("/v1/webhooks/{}/deliveries", hook["id"].as_str().unwrap());
    let (_, deliveries) = stage.call("GET", &list, Value::Null).await;
    let first = deliveries["items"].as_array().unwrap().last().unwrap();
    assert_eq!((first["state"].as_str(), first["attemptCount"].as_u64()), (Some("Delivered"), Some(3)));
    let statuses: Vec<_> =
        first["attempts"].as_array().unwrap().iter().map(|a| a["status"].clone()).collect();
    assert_eq!(statuses, [500, 302, 200]);
    stage.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_receiver_beside_a_fast_one_and_what_each_wants() {
    let mut stage = Stage::new().await;
    stage.answers("slow", &[0; 100]);
    stage.subscribe("slow", json!({})).await;
    stage.subscribe("fast", json!({"events": ["sandbox.created", "sandbox.terminated"]})).await;
    stage.subscribe("mine", json!({"metadata": {"team": "b"}, "events": ["sandbox.*"]})).await;
    let (a, b) = (stage.create(json!({"team": "a"})).await, stage.create(json!({"team": "b"})).await);
    stage.delete(&a).await;
    stage.delete(&b).await;
    let got = stage.until("fast", "both ends", |got| got.len() == 4).await;
    let mut seen = types(&got);
    seen.sort();
    assert_eq!(seen, ["sandbox.created", "sandbox.created", "sandbox.terminated", "sandbox.terminated"]);
    let mine = stage.until("mine", "its end", ended).await;
    assert!(mine.iter().all(|one| one.body["sandboxId"] == json!(b)));
    assert!(stage.got("slow").len() <= 2, "one of each sandbox is under way");
    stage.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_loses_nothing() {
    let mut stage = Stage::new().await;
    stage.answers("r", &[0]);
    stage.subscribe("r", json!({})).await;
    let id = stage.create(json!({})).await;
    stage.until("r", "the first", |got| !got.is_empty()).await;
    stage.stop().await;
    stage.start().await;
    stage.delete(&id).await;
    let got = stage.until("r", "the end", ended).await;
    let seqs: Vec<_> = got.iter().map(|one| one.body["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs[0], seqs[1], "what was under way comes again");
    let (_, page) = stage.call("GET", &format!("/v1/sandboxes/{id}/events"), Value::Null).await;
    let kept: Vec<_> = page["items"].as_array().unwrap().iter().map(|e| e["seq"].as_u64().unwrap()).collect();
    assert_eq!(seqs[1..], kept);
    stage.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn webhooks_are_made_read_changed_tested_and_removed() {
    let mut stage = Stage::new().await;
    for (body, word) in [
        (json!({}), "url"),
        (json!({"url": "http://example.org/"}), "https"),
        (json!({"url": "https://10.0.0.1/"}), "private"),
        (json!({"url": "https://u:p@example.org/"}), "password"),
        (json!({"url": "https://example.org/", "events": ["sandboxes"]}), "events"),
        (json!({"url": "https://example.org/", "secret": "hunter2"}), "whsec_"),
        (json!({"url": "https://example.org/", "x": 1}), "body"),
    ] {
        let (status, answer) = stage.call("POST", "/v1/webhooks", body.clone()).await;
        assert_eq!(
            (status, answer["code"].as_str()),
            (400, Some("SANDBOX::INVALID_PARAMETER")),
            "{body} {answer}"
        );
        assert!(answer["message"].as_str().unwrap().contains(word), "{answer}");
        assert!(!answer.to_string().contains("hunter2"));
    }
    let own = format!("whsec_{}", STANDARD.encode([7; 32]));
    let made = stage.subscribe("r", json!({"secret": own, "events": ["boot.*"]})).await;
    assert!(made.get("secret").is_none(), "known to whoever gave it");
    let path = format!("/v1/webhooks/{}", made["id"].as_str().unwrap());
    let (_, read) = stage.call("GET", &path, Value::Null).await;
    assert_eq!(read, made);
    let (status, tested) = stage.call("POST", &format!("{path}/test"), Value::Null).await;
    assert_eq!(
        (status, tested["delivered"].as_bool(), tested["attempt"]["status"].as_u64()),
        (200, Some(true), Some(200))
    );
    assert!(verified(&stage.got("r")[0], &own));
    assert_eq!(types(&stage.got("r")), ["webhook.test"]);
    let other = format!("whsec_{}", STANDARD.encode([8; 32]));
    let change = json!({"url": made["url"], "enabled": false, "secret": other});
    let (status, changed) = stage.call("PUT", &path, change).await;
    assert_eq!((status, changed["disabledReason"].as_str()), (200, Some("asked")), "{changed}");
    stage.call("POST", &format!("{path}/test"), Value::Null).await;
    let last = stage.got("r").pop().unwrap();
    assert!(verified(&last, &own) && verified(&last, &other), "both secrets for a while");
    let (_, list) = stage.call("GET", "/v1/webhooks", Value::Null).await;
    assert_eq!(list["items"].as_array().unwrap().len(), 1);
    assert!(!list.to_string().contains("whsec_"));
    assert_eq!(stage.call("DELETE", &path, Value::Null).await.0, 204);
    let (status, gone) = stage.call("GET", &path, Value::Null).await;
    assert_eq!((status, gone["code"].as_str()), (404, Some("WEBHOOK::NOT_FOUND")));
    stage.stop().await;
    assert!(stage.dir.path().exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn what_ended_is_shown_to_those_who_ask_for_it() {
    let mut stage = Stage::new().await;
    let id = stage.create(json!({"team": "a"})).await;
    let living = stage.create(json!({})).await;
    let path = format!("/v1/sandboxes/{id}");
    let (_, before) = stage.call("GET", &path, Value::Null).await;
    stage.delete(&id).await;
    assert_eq!(stage.call("GET", &path, Value::Null).await.0, 404);
    let (status, past) = stage.call("GET", &format!("{path}?includeTerminated=true"), Value::Null).await;
    assert_eq!(status, 200, "{past}");
    assert_eq!(
        (past["status"]["state"].as_str(), past["status"]["reason"].as_str()),
        (Some("Terminated"), Some("user_delete"))
    );
    for same in ["id", "image", "metadata", "createdAt", "expiresAt", "entrypoint"] {
        assert_eq!(past[same], before[same], "{same}");
    }
    let ids = async |query: &str| {
        let (_, list) = stage.call("GET", &format!("/v1/sandboxes{query}"), Value::Null).await;
        let items = list["items"].as_array().unwrap().clone();
        items.into_iter().map(|one| one["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(ids("").await, std::slice::from_ref(&living));
    assert_eq!(ids("?state=Terminated").await, std::slice::from_ref(&id));
    assert_eq!(ids("?state=Terminated&includeTerminated=false").await, [] as [String; 0]);
    assert_eq!(ids("?includeTerminated=true").await, [living, id]);
    assert_eq!(ids("?state=Terminated&metadata=team%3Db").await, [] as [String; 0]);
    let never = format!("/v1/sandboxes/{}?includeTerminated=true", SandboxId::random());
    assert_eq!(stage.call("GET", &never, Value::Null).await.0, 404);
    assert_eq!(stage.call("GET", &format!("{path}?includeTerminated=perhaps"), Value::Null).await.0, 422);
    stage.stop().await;
}
