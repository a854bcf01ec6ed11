//! A server that speaks as much of the two APIs as the command line needs, and remembers what it was asked.
//!
//! What a command does is chosen by its first word, see `script`.

mod workspace;

use std::{
    collections::BTreeMap,
    convert::Infallible,
    process::{Command, Output},
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{Multipart, Path, Query, Request, State},
    http::{HeaderMap, StatusCode, header},
    middleware::{self, Next},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::sync::Notify;

pub const ID: &str = "11111111-2222-4333-8444-555555555555";
pub const OTHER: &str = "11999999-2222-4333-8444-555555555555";
pub const KEY: &str = "k-secret-7";
const TOKEN: &str = "agent-token";

/// A file or directory inside the imagined sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inside {
    pub kind: &'static str,
    pub mode: u32,
    pub content: Vec<u8>,
}

#[derive(Debug, Default)]
pub struct Seen {
    /// `METHOD /path?query` of every request.
    pub requests: Vec<String>,
    /// Bodies of creates and commands.
    pub bodies: Vec<Value>,
    pub files: BTreeMap<String, Inside>,
    /// Answers of the log route, in order; the last one repeats.
    pub logs: Vec<String>,
    pub status: Option<Value>,
    /// What successive looks at a sandbox show beside what every sandbox shows; the last one repeats.
    pub looks: Vec<Value>,
    /// What successive readers of a sandbox's events get, as it goes over the wire.
    pub events: Vec<String>,
    /// A build: how it is, and what successive readers of its log get.
    pub build: Value,
    pub build_log: Vec<String>,
}

type Shared = Arc<(Mutex<Seen>, Notify)>;

pub struct Stub {
    pub url: String,
    shared: Shared,
    _runtime: tokio::runtime::Runtime,
}

impl Stub {
    pub fn start() -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let shared: Shared = Arc::default();
        let service = router(shared.clone());
        runtime.spawn(async move { axum::serve(listener, service).await.unwrap() });
        Self { url, shared, _runtime: runtime }
    }

    pub fn seen<T>(&self, look: impl FnOnce(&mut Seen) -> T) -> T {
        look(&mut self.shared.0.lock().unwrap())
    }

    /// Whether a request that starts with this text was made.
    pub fn was_asked(&self, start: &str) -> bool {
        self.seen(|seen| seen.requests.iter().any(|request| request.starts_with(start)))
    }

    /// The program, set up to talk to this server.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = program(arguments);
        command.env("SANDGLASS_URL", &self.url).env("SANDGLASS_API_KEY", KEY);
        command
    }

    pub fn run(&self, arguments: &[&str]) -> Output {
        self.command(arguments).output().unwrap()
    }
}

/// The program in an environment without settings.
pub fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sandglass"));
    command.args(arguments).env_clear();
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    command
}

pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn router(shared: Shared) -> Router {
    let agent = Router::new()
        .route("/ping", get(|| async { "" }))
        .route("/command", post(run).delete(interrupt))
        .route("/files/info", get(info))
        .route("/files/download", get(download))
        .route("/files/upload", post(upload))
        .route("/directories", post(make_directories))
        .route("/directories/list", get(tree))
        .layer(middleware::from_fn(token));
    Router::new()
        .route("/v1/sandboxes", post(create).get(list))
        .route("/v1/sandboxes/{id}", get(one).delete(remove))
        .route("/v1/sandboxes/{id}/endpoints/{port}", get(endpoint))
        .route("/v1/sandboxes/{id}/diagnostics/logs", get(logs))
        .route("/v1/images/pull", post(pull))
        .nest("/v1/sandboxes/{id}/proxy/44772", agent)
        .merge(workspace::routes())
        .layer(middleware::from_fn_with_state(shared.clone(), remember))
        .with_state(shared)
}

fn refused(status: StatusCode, code: &str, message: &str) -> Response {
    (status, [("x-request-id", "req-42")], Json(json!({ "code": code, "message": message }))).into_response()
}

async fn remember(State(shared): State<Shared>, request: Request, next: Next) -> Response {
    let line = format!("{} {}", request.method(), request.uri());
    shared.0.lock().unwrap().requests.push(line);
    match request.headers().get("open-sandbox-api-key") {
        Some(key) if key == KEY => next.run(request).await,
        Some(_) => refused(StatusCode::UNAUTHORIZED, "INVALID_API_KEY", "the API key is wrong"),
        None => refused(StatusCode::UNAUTHORIZED, "MISSING_API_KEY", "an API key is needed"),
    }
}

async fn token(request: Request, next: Next) -> Response {
    if request.headers().get("x-execd-access-token").is_some_and(|given| given == TOKEN) {
        next.run(request).await
    } else {
        (StatusCode::UNAUTHORIZED, Json(json!({ "error": "Unauthorized" }))).into_response()
    }
}

fn sandbox(id: &str, status: Option<Value>) -> Value {
    json!({
        "id": id,
        "image": { "uri": "tools:1" },
        "status": status.unwrap_or_else(|| json!({ "state": "Running", "reason": "CONTAINER_RUNNING" })),
        "entrypoint": ["sleep", "9"],
        "createdAt": "2020-01-01T00:00:00Z",
        "metadata": { "name": if id == ID { "first" } else { "second" } },
        "unknownField": 7,
    })
}

async fn create(State(shared): State<Shared>, Json(body): Json<Value>) -> Response {
    let refuse = body["image"]["uri"] == "nosuch";
    let begins = body.get("repository").map(|_| json!({ "state": "Pending", "reason": "accepted" }));
    shared.0.lock().unwrap().bodies.push(body);
    if refuse {
        return refused(StatusCode::NOT_FOUND, "IMAGE::NOT_FOUND", "there is no image nosuch");
    }
    (StatusCode::ACCEPTED, Json(sandbox(ID, begins))).into_response()
}

async fn list() -> Json<Value> {
    let items = [sandbox(ID, None), sandbox(OTHER, Some(json!({ "state": "Paused" })))];
    Json(json!({ "items": items, "pagination": { "hasNextPage": false } }))
}

async fn one(State(shared): State<Shared>, Path(id): Path<String>) -> Json<Value> {
    let mut seen = shared.0.lock().unwrap();
    let mut shown = sandbox(&id, seen.status.clone());
    let look = if seen.looks.len() > 1 { Some(seen.looks.remove(0)) } else { seen.looks.first().cloned() };
    for (name, value) in look.iter().filter_map(Value::as_object).flatten() {
        shown[name] = value.clone();
    }
    Json(shown)
}

async fn remove(Path(id): Path<String>) -> Response {
    match id.as_str() {
        ID | OTHER => StatusCode::NO_CONTENT.into_response(),
        _ => refused(StatusCode::NOT_FOUND, "SANDBOX::NOT_FOUND", "no such sandbox"),
    }
}

async fn endpoint(Path((id, port)): Path<(String, u16)>, headers: HeaderMap) -> Json<Value> {
    let host = headers[header::HOST].to_str().unwrap();
    Json(json!({
        "endpoint": format!("{host}/v1/sandboxes/{id}/proxy/{port}"),
        "headers": { "X-EXECD-ACCESS-TOKEN": TOKEN },
    }))
}

async fn logs(State(shared): State<Shared>) -> String {
    let mut seen = shared.0.lock().unwrap();
    if seen.logs.len() > 1 { seen.logs.remove(0) } else { seen.logs.first().cloned().unwrap_or_default() }
}

async fn pull(Json(body): Json<Value>) -> String {
    let done = json!({ "event": "done", "image": { "id": "sha256:abc", "references": ["x:1"] } });
    let progress =
        json!({ "event": "progress", "phase": "download", "layer": "a", "current": 1, "total": 2 });
    match body["reference"].as_str().unwrap() {
        "cut" => format!("{progress}\n"),
        "bad" => {
            format!("{progress}\n{}\n", json!({ "event": "error", "code": "IMAGE::X", "message": "no" }))
        }
        _ => format!("{progress}\n{done}\n"),
    }
}

fn event(kind: &str, text: &str) -> String {
    format!("{}\n\n", json!({ "type": kind, "text": text, "timestamp": 1 }))
}

fn failed(value: &str, trace: &str) -> String {
    let error = json!({ "ename": "CommandExecError", "evalue": value, "traceback": [trace] });
    format!("{}\n\n", json!({ "type": "error", "timestamp": 1, "error": error }))
}

const DONE: &str = "{\"type\":\"execution_complete\",\"timestamp\":1}\n\n";

/// What a command prints and how it ends.
fn script(word: &str) -> String {
    match word {
        "talk" => [
            event("stdout", "héllo"),
            event("ping", "pong"),
            event("stdout", "\n"),
            event("stderr", "oops"),
            event("stdout", "<end>"),
            DONE.to_owned(),
        ]
        .concat(),
        "seven" => failed("7", "exit status 7"),
        "killed" => failed("-1", "signal: killed"),
        "missing" => failed("exec: \"missing\": executable file not found in $PATH", ""),
        "denied" => failed("fork/exec /x: permission denied", ""),
        "cut" => event("stdout", "half"),
        "readlink" => event("stdout", "/etc/passwd") + DONE,
        _ => DONE.to_owned(),
    }
}

async fn run(State(shared): State<Shared>, Json(body): Json<Value>) -> Response {
    let line = || body["command"].as_str()?.split_whitespace().next();
    let word = body["argv"][0].as_str().or_else(line).unwrap_or_default().to_owned();
    shared.0.lock().unwrap().bodies.push(body);
    let first = event("init", "c0ffee") + &event("ping", "pong");
    let body = match word.as_str() {
        "flood" => {
            let lines = stream::iter(0..2_000_000).map(|_| event("stdout", "y"));
            Body::from_stream(stream::iter([first]).chain(lines).map(Ok::<_, Infallible>))
        }
        // The connection breaks inside an event, once what was written before has left.
        "abort" => {
            let half = first + &event("stdout", "half") + "{\"type\":\"exec";
            let broken = stream::once(async {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Err(std::io::Error::other("broken"))
            });
            Body::from_stream(stream::iter([Ok(half)]).chain(broken))
        }
        _ => {
            let first = if word == "wait" { first + &event("stdout", "waiting") } else { first };
            let rest = stream::once(async move {
                if word == "wait" {
                    shared.1.notified().await;
                    return failed("-1", "signal: terminated");
                }
                script(&word)
            });
            let pieces = stream::iter([first]).chain(rest).flat_map(|text| {
                // Arbitrary boundaries, as a network makes them.
                stream::iter(text.into_bytes().chunks(7).map(Bytes::copy_from_slice).collect::<Vec<_>>())
            });
            Body::from_stream(pieces.map(Ok::<_, Infallible>))
        }
    };
    ([(header::CONTENT_TYPE, "text/event-stream")], body).into_response()
}

async fn interrupt(State(shared): State<Shared>) {
    shared.1.notify_one();
}

type Params = Query<BTreeMap<String, String>>;

fn absent() -> Response {
    refused(StatusCode::NOT_FOUND, "FILE_NOT_FOUND", "no such file")
}

fn described(path: &str, inside: &Inside) -> Value {
    let mode: u32 = format!("{:o}", inside.mode).parse().unwrap();
    json!({ "path": path, "type": inside.kind, "mode": mode, "size": inside.content.len(),
            "owner": "root", "group": "root", "modified_at": "2020-01-01T00:00:00Z", "created_at": "2020-01-01T00:00:00Z" })
}

async fn info(State(shared): State<Shared>, Query(query): Params) -> Response {
    let path = &query["path"];
    match shared.0.lock().unwrap().files.get(path.trim_end_matches("/.")) {
        Some(inside) => Json(json!({ path.as_str(): described(path, inside) })).into_response(),
        None => absent(),
    }
}

async fn download(State(shared): State<Shared>, Query(query): Params) -> Response {
    match shared.0.lock().unwrap().files.get(&query["path"]) {
        // Promises more than it sends.
        Some(inside) if inside.content == b"CUT" => {
            let pieces = [Ok(Bytes::from_static(b"half")), Err(std::io::Error::other("broken"))];
            Body::from_stream(stream::iter(pieces)).into_response()
        }
        Some(inside) => inside.content.clone().into_response(),
        None => absent(),
    }
}

async fn upload(State(shared): State<Shared>, mut form: Multipart) -> Response {
    let mut description: Option<Value> = None;
    while let Some(field) = form.next_field().await.unwrap() {
        let name = field.name().unwrap().to_owned();
        assert!(field.file_name().is_some(), "the agent reads file parts only");
        let content = field.bytes().await.unwrap().to_vec();
        if name == "metadata" {
            description = Some(serde_json::from_slice(&content).unwrap());
            continue;
        }
        let about = description.take().expect("metadata comes before the file");
        let mode = u32::from_str_radix(&about["mode"].as_u64().unwrap_or(644).to_string(), 8).unwrap();
        let path = about["path"].as_str().unwrap().to_owned();
        shared.0.lock().unwrap().files.insert(path, Inside { kind: "file", mode, content });
    }
    StatusCode::OK.into_response()
}

async fn make_directories(State(shared): State<Shared>, Json(body): Json<Value>) {
    for (path, about) in body.as_object().unwrap() {
        let mode = u32::from_str_radix(&about["mode"].to_string(), 8).unwrap();
        let directory = Inside { kind: "directory", mode, content: Vec::new() };
        shared.0.lock().unwrap().files.entry(path.clone()).or_insert(directory);
    }
}

async fn tree(State(shared): State<Shared>, Query(query): Params) -> Json<Value> {
    let root = format!("{}/", query["path"].trim_end_matches("/.").trim_end_matches('/'));
    let seen = shared.0.lock().unwrap();
    let below = seen.files.iter().filter(|(path, _)| path.starts_with(&root));
    Json(below.map(|(path, inside)| described(path, inside)).collect())
}
