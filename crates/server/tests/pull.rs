//! Agents that cannot call: the server asks them, over HTTP on loopback.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    time::Duration,
};

use axum::{
    Json, Router,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::IntoResponse,
    routing::{get, post, put},
};
use sandglass_bridge::{
    pull::{self, PullQuery, PullStatus},
    ring::{Draft, Ring},
    wire::{Activity, Class, Load},
};
use sandglass_server::builds::inside::over_http;
use serde_json::{Value, json};

use crate::workspaces::{Fate, Stage, URL};

const OUTPUT: &str = "installing\nready\n";

/// The part of an agent's API that a server asks.
struct Agent {
    ring: Mutex<Ring>,
    /// What it was told to do.
    told: Mutex<Vec<String>>,
    silent: AtomicBool,
}

impl Agent {
    fn new(boot: &str) -> Arc<Self> {
        let ring = Mutex::new(Ring::in_memory(boot.parse().unwrap()));
        Arc::new(Self { ring, told: Mutex::default(), silent: AtomicBool::new(false) })
    }

    fn happens(&self, kind: &str, data: &Value) {
        let draft = Draft::new(Class::State, jiff::Timestamp::UNIX_EPOCH, kind, data).unwrap();
        self.ring.lock().unwrap().push(draft).unwrap();
    }

    fn forgotten(&self) -> bool {
        let status = self.ring.lock().unwrap().status();
        status.acked_seq == status.last_seq && status.events == 0
    }

    /// Serves on loopback; the port.
    async fn serve(self: &Arc<Self>) -> u16 {
        let router = Router::new()
            .route("/v1/workspace/bridge/status", get(status))
            .route("/v1/workspace/bridge/events", get(events))
            .route("/v1/workspace/logs", get(logs))
            .route("/v1/workspace/logs/{source}", get(log))
            .route("/v1/workspace/services/{name}/{verb}", post(told))
            .route("/v1/workspace/services/{name}", put(refuses))
            .with_state(self.clone());
        let listener = tokio::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move { axum::serve(listener, router).await.unwrap() });
        port
    }
}

type Asked = State<Arc<Agent>>;

async fn status(State(agent): Asked, headers: HeaderMap) -> impl IntoResponse {
    if agent.silent.load(SeqCst) || !headers.contains_key("x-execd-access-token") {
        return StatusCode::SERVICE_UNAVAILABLE.into_response();
    }
    let ring = agent.ring.lock().unwrap();
    let status = ring.status();
    let shown = PullStatus {
        boot_id: ring.boot().clone(),
        generation: 1,
        agent_version: "1.2.3".into(),
        protocol_version: 1,
        acked_seq: status.acked_seq,
        last_seq: status.last_seq,
        activity: Activity::default(),
        services: Vec::new(),
        load: Load::default(),
    };
    Json(shown).into_response()
}

async fn events(State(agent): Asked, Query(query): Query<PullQuery>) -> impl IntoResponse {
    // Small pages, so that there are several.
    let page = pull::events(&mut agent.ring.lock().unwrap(), &PullQuery { limit: 2, ..query });
    Json(page)
}

async fn logs() -> impl IntoResponse {
    Json(json!({"items": [{"source": "boot.setup.web/app", "oldest": 0, "end": OUTPUT.len()}]}))
}

async fn log(Path(source): Path<String>, Query(query): Query<Value>) -> impl IntoResponse {
    assert_eq!(source, "boot.setup.web/app");
    let from: usize = query["from"].as_str().unwrap().parse().unwrap();
    let headers = [("x-log-offset", from.to_string()), ("x-log-next", OUTPUT.len().to_string())];
    (headers, &OUTPUT[from..])
}

async fn told(State(agent): Asked, Path((name, verb)): Path<(String, String)>) -> impl IntoResponse {
    agent.told.lock().unwrap().push(format!("{name} {verb}"));
    (StatusCode::ACCEPTED, Json(json!({})))
}

async fn refuses() -> impl IntoResponse {
    (StatusCode::CONFLICT, Json(json!({"code": "SERVICE::BUSY", "message": "not now"})))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_agent_that_cannot_call_is_asked() {
    let agent = Agent::new("boot-1");
    let mut stage = Stage::new(Fate::Found).await;
    stage.service.runtime.is_remote(agent.serve().await);
    let inside = over_http().unwrap();
    stage.service.engine.speak_through(inside.clone(), Ipv4Addr::LOCALHOST.into());
    let id = stage
        .create(json!({
            "repository": {"url": URL, "ref": "main"},
            "services": [{"name": "app", "command": ["npm", "start"], "port": 3000}],
            "agent": {"heartbeatIntervalSeconds": 1, "heartbeatTimeoutSeconds": 3},
            "timeout": 600,
        }))
        .await;
    agent.happens("boot.phase_started", &json!({"phase": "setup", "timeoutSeconds": 300}));
    stage.until(&id, "Pending", "booting").await;
    for _ in 0..5 {
        agent.happens("boot.phase_progress", &json!({"phase": "setup", "message": "on"}));
    }
    agent.happens("boot.completed", &json!({"warnings": 0}));
    let seen = stage.until(&id, "Running", "ready").await;
    assert_eq!(seen["agent"]["version"], "1.2.3");
    let forgotten = async {
        while !agent.forgotten() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(600), forgotten).await.unwrap();

    let services = format!("/v1/sandboxes/{id}/services");
    let restarted = stage.service.call("POST", &format!("{services}/app/restart"), Value::Null).await;
    assert_eq!(
        (restarted.status, &*agent.told.lock().unwrap()),
        (202, &["app restart".to_owned()][..].to_vec())
    );
    let refused = stage.service.call("PUT", &format!("{services}/app"), json!({"enabled": false})).await;
    assert_eq!(refused.code(), (409, "SANDBOX::INVALID_STATE"));

    // No answer is silence, for which the lease is judged; it is forgiven like any other.
    agent.silent.store(true, SeqCst);
    stage.until(&id, "Running", "unresponsive").await;
    agent.silent.store(false, SeqCst);
    stage.until(&id, "Running", "ready").await;

    // The next server goes on where this one was.
    stage.service.restart().await;
    stage.service.engine.speak_through(inside, Ipv4Addr::LOCALHOST.into());
    agent.happens(
        "boot.warning",
        &json!({"reason": "boot_failed", "phase": "start", "message": "late", "outputTail": ""}),
    );
    stage.until_told(&id, "boot.warning").await;
    let kinds = stage.types(&id).await;
    let times = |kind: &str| kinds.iter().filter(|told| *told == kind).count();
    assert_eq!((times("boot.phase_started"), times("boot.completed"), times("boot.warning")), (1, 1, 1));

    let path = stage.files(&id).join("output");
    let kept = std::fs::read_dir(path).unwrap().next().unwrap().unwrap().path();
    let kept =
        std::fs::read_dir(kept).unwrap().map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap());
    assert_eq!(kept.collect::<String>(), OUTPUT, "once, also over a restart");

    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_failed_in_a_box_that_is_asked_is_told() {
    let agent = Agent::new("boot-1");
    let stage = Stage::new(Fate::Found).await;
    stage.service.runtime.is_remote(agent.serve().await);
    stage.service.engine.speak_through(over_http().unwrap(), Ipv4Addr::LOCALHOST.into());
    let failed = json!({"reason": "boot_failed", "phase": "setup", "step": "web", "exitCode": 3,
        "message": "exit status 3", "outputTail": "no such package"});
    agent.happens("boot.failed", &failed);
    let id = stage.create(json!({"repository": {"url": URL}, "timeout": 600})).await;
    let seen = stage.until(&id, "Failed", "boot_failed").await;
    assert_eq!(
        (&seen["lastFailure"]["exitCode"], &seen["lastFailure"]["outputTail"]),
        (&json!(3), &json!("no such package"))
    );
    assert_eq!(stage.delete(&id).await, 204);
    stage.nothing_is_left(&id).await;
}
