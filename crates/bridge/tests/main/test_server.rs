//! A server of the channel on a real socket, built from the registry as a product would build it.

use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use jiff::Timestamp;
use sandglass_bridge::Monotonic;
use sandglass_bridge::server::{Caller, Notice, Registry, SavedSandbox, Settled};
use sandglass_bridge::wire::limits::STREAM_KEEP_ALIVE;
use sandglass_bridge::wire::{
    AttachRequest, Event, EventsReply, FatalReport, GitCredential, GitCredentialRequest, LogsRequest,
    Outcome, Refusal, Secret, paths, read_events, sse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// What outlives a server.
#[derive(Default)]
pub struct Disk {
    pub events: Vec<Event>,
    pub log: Vec<u8>,
    pub results: Vec<(String, Outcome)>,
    pub fatal: Option<FatalReport>,
    pub notices: Vec<Notice>,
    /// Positions that streams were opened with.
    pub resumed: Vec<Option<String>>,
}

pub struct State {
    pub registry: Mutex<Registry>,
    pub disk: Arc<Mutex<Disk>>,
    pub clock: Monotonic,
    pub changed: Notify,
}

pub struct TestServer {
    pub state: Arc<State>,
    task: AbortHandle,
    socket: Option<PathBuf>,
}

impl TestServer {
    pub fn unix(path: &Path, registry: Registry, clock: Monotonic, disk: Arc<Mutex<Disk>>) -> Self {
        let listener = UnixListener::bind(path).unwrap();
        let state = Arc::new(State { registry: Mutex::new(registry), disk, clock, changed: Notify::new() });
        let serving = state.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        connections.spawn(serve(accepted.unwrap().0, serving.clone()));
                    }
                    () = tick(&serving) => {}
                }
            }
        });
        Self { state, task: task.abort_handle(), socket: Some(path.to_owned()) }
    }

    pub fn tcp(listener: TcpListener, registry: Registry, clock: Monotonic, disk: Arc<Mutex<Disk>>) -> Self {
        let state = Arc::new(State { registry: Mutex::new(registry), disk, clock, changed: Notify::new() });
        let serving = state.clone();
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(serve(stream, serving.clone()));
            }
        });
        Self { state, task: task.abort_handle(), socket: None }
    }

    /// Dies with all its connections. What it had stored is what a next life finds.
    pub fn kill(self) -> Vec<SavedSandbox> {
        self.task.abort();
        if let Some(socket) = &self.socket {
            std::fs::remove_file(socket).unwrap();
        }
        self.state.registry.lock().unwrap().saved()
    }
}

/// The one timer of all leases.
async fn tick(state: &State) {
    let due = state.registry.lock().unwrap().next_due();
    let next = due.map_or_else(|| Instant::now() + STREAM_KEEP_ALIVE, |due| state.clock.instant(due));
    tokio::select! {
        () = tokio::time::sleep_until(next) => {}
        () = state.changed.notified() => {}
    }
    let mut registry = state.registry.lock().unwrap();
    registry.advance(state.clock.now());
    state.disk.lock().unwrap().notices.extend(registry.take_notices());
}

async fn serve(stream: impl AsyncRead + AsyncWrite + Unpin, state: Arc<State>) {
    let service = service_fn(move |request| {
        let state = state.clone();
        async move { Ok::<_, Infallible>(answer(request, state).await.unwrap_or_else(refused)) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(request: Request<Incoming>, state: Arc<State>) -> Result<Response<Body>, Refusal> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Refusal::Busy)?.to_bytes();
    let header =
        |name: &str| parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let token = header("authorization").strip_prefix("Bearer ").unwrap_or_default().to_owned();
    let sandbox = header(paths::SANDBOX_HEADER).to_owned();
    let generation = header(paths::GENERATION_HEADER).parse().unwrap_or(0);
    let lease = header(paths::LEASE_HEADER).to_owned();
    let caller = Caller { sandbox: &sandbox, generation, token: &token, lease: Some(&lease) };
    let now = state.clock.now();
    let mut registry = state.registry.lock().unwrap();
    let mut disk = state.disk.lock().unwrap();
    let response = match (&parts.method, parts.uri.path()) {
        (&Method::POST, paths::ATTACH) => {
            json(&registry.attach(&caller, &read::<AttachRequest>(&body), now, Timestamp::now())?)
        }
        (&Method::POST, paths::HEARTBEAT) => json(&registry.heartbeat(&caller, now)?),
        (&Method::POST, paths::EVENTS) => {
            let admitted = registry.admit(&caller, read_events(&body).unwrap(), now)?;
            disk.events.extend(admitted.events);
            let acked_seq = match admitted.ticket {
                Some(ticket) => registry.commit(&sandbox, &ticket).unwrap(),
                None => admitted.from,
            };
            json(&EventsReply { acked_seq })
        }
        (&Method::POST, paths::LOGS) => {
            let batch = registry.logs(&caller, read::<LogsRequest>(&body).frames)?.unwrap();
            for piece in batch.pieces {
                assert_eq!((piece.offset, piece.lost), (disk.log.len() as u64, 0));
                disk.log.extend(piece.bytes);
            }
            json(&batch.reply)
        }
        (&Method::POST, paths::FATAL) => {
            registry.fatal(&caller)?;
            disk.fatal.get_or_insert(read(&body));
            json(&())
        }
        (&Method::POST, paths::GIT_CREDENTIAL) => {
            registry.credential(&caller, &read::<GitCredentialRequest>(&body))?;
            json(&GitCredential {
                username: "x".into(),
                password: Secret::new("p".into()),
                known_hosts: None,
                expires_at: None,
            })
        }
        (&Method::GET, paths::STREAM) => {
            let after = parts.headers.get(paths::LAST_EVENT_ID).map(|id| id.to_str().unwrap().to_owned());
            registry.commands(&caller, after.as_deref(), now)?;
            disk.resumed.push(after.clone());
            drop((registry, disk));
            return Ok(commands(state, [sandbox, token, lease], generation, after));
        }
        (&Method::POST, path) => {
            let command = paths::command_of_result(path).unwrap();
            if registry.settle(&caller, command)? == Settled::First {
                disk.results.push((command.to_owned(), read(&body)));
            }
            json(&())
        }
        other => panic!("nothing answers {other:?}"),
    };
    disk.notices.extend(registry.take_notices());
    drop((registry, disk));
    state.changed.notify_waiters();
    Ok(response)
}

/// The stream: commands as they come, comments in between.
fn commands(
    state: Arc<State>,
    [sandbox, token, lease]: [String; 3],
    generation: u64,
    after: Option<String>,
) -> Response<Body> {
    let chunks = stream::unfold((state, after), move |(state, mut after)| {
        let (sandbox, token, lease) = (sandbox.clone(), token.clone(), lease.clone());
        async move {
            loop {
                let watched = state.clone();
                let changed = watched.changed.notified();
                let caller = Caller { sandbox: &sandbox, generation, token: &token, lease: Some(&lease) };
                let now = state.clock.now();
                let frames = state.registry.lock().unwrap().commands(&caller, after.as_deref(), now).ok()?;
                if let Some(last) = frames.last() {
                    after = Some(last.command_id.to_string());
                    let text: String = frames.iter().map(|frame| sse::command(frame).unwrap()).collect();
                    return Some((Bytes::from(text), (state, after)));
                }
                if tokio::time::timeout(STREAM_KEEP_ALIVE, changed).await.is_err() {
                    return Some((Bytes::from_static(sse::KEEP_ALIVE.as_bytes()), (state, after)));
                }
            }
        }
    });
    let body = StreamBody::new(chunks.map(|chunk| Ok(Frame::data(chunk))));
    Response::builder().header("content-type", "text/event-stream").body(body.boxed_unsync()).unwrap()
}

fn refused(refusal: Refusal) -> Response<Body> {
    let mut response = json(&refusal.body());
    *response.status_mut() = StatusCode::from_u16(refusal.status()).unwrap();
    response
}

fn read<T: DeserializeOwned>(body: &[u8]) -> T {
    serde_json::from_slice(body).unwrap()
}

fn json(value: &impl Serialize) -> Response<Body> {
    Response::new(Full::from(serde_json::to_vec(value).unwrap()).boxed_unsync())
}
