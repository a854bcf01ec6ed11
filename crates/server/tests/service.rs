//! The whole router over fakes that a test can reach behind.

use std::{path::PathBuf, sync::Arc, time::Duration};

use ::http::{HeaderMap, Request, StatusCode};
use axum::{
    Router,
    body::{Body, BodyDataStream, to_bytes},
};
use futures_util::StreamExt;
use sandglass_sandbox::Clock;
use sandglass_server::{
    config::Config,
    engine::{Engine, Settings},
    http::{self, App, router},
    tenants::Keyring,
    workspace::{self, Images, Workspaces},
};
use sandglass_testkit::{FakeRuntime, ManualClock, MemoryStore};
use serde_json::{Value, json};
use tower::ServiceExt;

pub struct Service {
    pub runtime: Arc<FakeRuntime>,
    pub store: Arc<MemoryStore>,
    pub clock: Arc<ManualClock>,
    pub engine: Arc<Engine>,
    router: Router,
    keys: Keyring,
    config: Arc<Config>,
    /// Where sandboxes are made from repositories.
    pub workspaces: Option<Arc<Workspaces>>,
    repositories: Option<(Arc<dyn Images>, PathBuf)>,
}

pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Value,
}

impl Answer {
    pub fn code(&self) -> (u16, &str) {
        (self.status, self.body["code"].as_str().unwrap_or_default())
    }
}

impl Service {
    pub async fn new() -> Self {
        Self::with(Keyring::single(None)).await
    }

    pub async fn with(keys: Keyring) -> Self {
        Self::configured(keys, Config::default()).await
    }

    pub async fn configured(keys: Keyring, config: Config) -> Self {
        let (runtime, store, clock) = (Arc::default(), Arc::default(), Arc::new(ManualClock::default()));
        let config = Arc::new(config);
        let (engine, router, workspaces) =
            Self::start(&runtime, &store, &clock, (&keys, &config), None).await;
        let repositories = None;
        Self { runtime, store, clock, engine, router, keys, config, workspaces, repositories }
    }

    /// Makes sandboxes from repositories, with images from there and files below that folder.
    pub async fn with_repositories(images: Arc<dyn Images>, folder: PathBuf) -> Self {
        let mut service = Self::new().await;
        service.repositories = Some((images, folder));
        service.restart().await;
        service
    }

    async fn start(
        runtime: &Arc<FakeRuntime>,
        store: &Arc<MemoryStore>,
        clock: &Arc<ManualClock>,
        (keys, config): (&Keyring, &Arc<Config>),
        repositories: Option<&(Arc<dyn Images>, PathBuf)>,
    ) -> (Arc<Engine>, Router, Option<Arc<Workspaces>>) {
        let engine = Engine::new(runtime.clone(), store.clone(), clock.clone(), Settings::default());
        let mut workspaces = None;
        if let Some((images, folder)) = repositories {
            let settings = workspace::Settings::new(folder.clone());
            let opened =
                Workspaces::open(settings, store.clone(), clock.clone(), images.clone()).await.unwrap();
            opened.serve(&engine);
            engine.provision_with(opened.clone());
            workspaces = Some(opened);
        }
        let (of, at) = (workspaces.clone(), clock.clone());
        engine.describe_with(move |entry| http::describe(entry, of.as_deref(), at.now()));
        engine.recover().await.unwrap();
        let mut app = App::new(config.clone(), engine.clone(), None, keys.clone());
        if let Some(workspaces) = &workspaces {
            workspaces.settle().await;
            app = app.with_workspaces(workspaces.clone());
        }
        (engine, router::build(app).into_router(), workspaces)
    }

    /// Another server on the same runtime and store.
    pub async fn restart(&mut self) {
        self.restart_after(Duration::ZERO).await;
    }

    /// The same, after so long without one.
    pub async fn restart_after(&mut self, time: Duration) {
        self.engine.stop().await;
        if let Some(workspaces) = self.workspaces.take() {
            workspaces.stop().await;
        }
        tokio::time::sleep(time).await;
        let keys = (&self.keys, &self.config);
        (self.engine, self.router, self.workspaces) =
            Self::start(&self.runtime, &self.store, &self.clock, keys, self.repositories.as_ref()).await;
    }

    async fn send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &Value,
    ) -> (::http::response::Parts, Body) {
        let mut request = Request::builder().method(method).uri(path).header("host", "h");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let body = match body {
            Value::Null => Body::empty(),
            value => {
                request = request.header("content-type", "application/json");
                Body::from(value.to_string())
            }
        };
        self.router.clone().oneshot(request.body(body).unwrap()).await.unwrap().into_parts()
    }

    pub async fn call_with(&self, method: &str, path: &str, headers: &[(&str, &str)], body: Value) -> Answer {
        let (parts, body) = self.send(method, path, headers, &body).await;
        let bytes = to_bytes(body, 64 << 20).await.unwrap();
        let body = if bytes.is_empty() { Value::Null } else { serde_json::from_slice(&bytes).unwrap() };
        Answer { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    pub async fn call(&self, method: &str, path: &str, body: Value) -> Answer {
        self.call_with(method, path, &[], body).await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.call("GET", path, Value::Null).await
    }

    pub async fn create(&self) -> String {
        let body = json!({"image": {"uri": "img"}, "entrypoint": ["sleep", "1d"], "resourceLimits": {}});
        let made = self.call("POST", "/v1/sandboxes", body).await;
        assert_eq!(made.status, 202, "{}", made.body);
        made.body["id"].as_str().unwrap().to_owned()
    }

    /// An answer as it comes, with its status.
    pub async fn pieces(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, BodyDataStream) {
        let (parts, body) = self.send(method, path, headers, &Value::Null).await;
        (parts.status.as_u16(), body.into_data_stream())
    }

    /// Opens the stream of a sandbox's events.
    pub async fn stream(&self, path: &str, headers: &[(&str, &str)]) -> Stream {
        let headers: Vec<_> =
            [("accept", "text/event-stream")].into_iter().chain(headers.iter().copied()).collect();
        let (parts, body) = self.send("GET", path, &headers, &Value::Null).await;
        assert_eq!(parts.status, StatusCode::OK);
        assert!(parts.headers["content-type"].to_str().unwrap().starts_with("text/event-stream"));
        Stream { body: body.into_data_stream(), text: String::new() }
    }
}

pub struct Stream {
    body: BodyDataStream,
    text: String,
}

/// One frame: its id, its type, its data.
#[derive(Debug, Clone, PartialEq)]
pub struct Frame {
    pub id: Option<u64>,
    pub kind: String,
    pub data: Value,
}

impl Stream {
    /// The next frame as it came, `None` at the end.
    pub async fn raw(&mut self) -> Option<String> {
        loop {
            if let Some((frame, rest)) = self.text.split_once("\n\n") {
                let (frame, rest) = (frame.to_owned(), rest.to_owned());
                self.text = rest;
                return Some(frame);
            }
            let bytes = self.body.next().await?.unwrap();
            self.text.push_str(std::str::from_utf8(&bytes).unwrap());
        }
    }

    /// The next frame that is an event, `None` at the end.
    pub async fn next(&mut self) -> Option<Frame> {
        loop {
            let text = self.raw().await?;
            let field = |name: &str| text.lines().find_map(|l| l.strip_prefix(name)).map(str::to_owned);
            let Some(kind) = field("event: ") else { continue };
            let data = serde_json::from_str(&field("data: ").unwrap()).unwrap();
            return Some(Frame { id: field("id: ").map(|id| id.parse().unwrap()), kind, data });
        }
    }

    /// Every event until the end.
    pub async fn rest(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }
}
