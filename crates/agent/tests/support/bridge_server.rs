//! A server of the agent's channel on a Unix socket, built from the registry as a product would build it.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

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
use sandglass_bridge::server::{
    Caller, LeaseTimes, Registration, Registry, RepositoryScope, Settled, TokenHash,
};
use sandglass_bridge::wire::limits::STREAM_KEEP_ALIVE;
use sandglass_bridge::wire::{
    AttachRequest, Command, Event, EventsReply, FatalReport, GitCredential, GitCredentialRequest, Heartbeat,
    LogsRequest, Outcome, Refusal, Secret, paths, read_events, sse,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

type Body = UnsyncBoxBody<Bytes, Infallible>;

pub const SANDBOX: &str = "7b0f7d1e-5f0a-4c1e-9a53-0d6e2b1f4a10";
pub const TOKEN: &str = "0123456789abcdef0123456789abcdef";
pub const USER: &str = "x-access-token";
pub const PASSWORD: &str = "ghs_the-secret-of-the-repository";

/// What was told and asked.
#[derive(Default)]
pub struct Disk {
    pub events: Vec<Event>,
    pub heartbeats: Vec<Heartbeat>,
    pub logs: BTreeMap<String, Vec<u8>>,
    pub results: Vec<(String, Outcome)>,
    pub fatal: Option<FatalReport>,
    pub credentials: Vec<GitCredentialRequest>,
}

struct State {
    registry: Mutex<Registry>,
    disk: Mutex<Disk>,
    clock: Monotonic,
    changed: Notify,
}

pub struct Server {
    state: Arc<State>,
    socket: PathBuf,
    serving: Option<(CancellationToken, JoinHandle<()>)>,
}

impl Server {
    /// Serves on a socket in that folder, for generation 1 of the sandbox.
    pub fn start(folder: &Path, repositories: &[(&str, &str)]) -> Self {
        let mut registry = Registry::new(1);
        let clock = Monotonic::start();
        registry.register(registration(1, TOKEN, repositories), clock.now()).unwrap();
        let state =
            State { registry: Mutex::new(registry), disk: Mutex::default(), clock, changed: Notify::new() };
        let mut server = Server { state: Arc::new(state), socket: folder.join("agent.sock"), serving: None };
        server.mend();
        server
    }

    pub fn disk<T>(&self, look: impl FnOnce(&Disk) -> T) -> T {
        look(&self.state.disk.lock().unwrap())
    }

    /// Data of the events of a type so far.
    pub fn events(&self, kind: &str) -> Vec<serde_json::Value> {
        self.disk(|disk| {
            let of_kind = disk.events.iter().filter(|event| event.kind == kind);
            of_kind.map(|event| serde_json::from_str(event.data.get()).unwrap()).collect()
        })
    }

    /// Tells the agent what to do.
    pub fn command(&self, command: &Command) -> String {
        let now = self.state.clock.now();
        let mut registry = self.state.registry.lock().unwrap();
        let id = registry.enqueue(SANDBOX, command, None, now, Timestamp::now()).unwrap();
        drop(registry);
        self.state.changed.notify_waiters();
        id.to_string()
    }

    pub fn outcome(&self, command: &str) -> Option<Outcome> {
        self.disk(|disk| {
            disk.results.iter().find(|(id, _)| id == command).map(|(_, outcome)| outcome.clone())
        })
    }

    /// Expects the agent of another generation or token.
    pub fn expect(&self, generation: u64, token: &str) {
        let now = self.state.clock.now();
        self.state.registry.lock().unwrap().register(registration(generation, token, &[]), now).unwrap();
        self.state.changed.notify_waiters();
    }

    /// Cuts the link: nobody listens any more, and what is open breaks.
    pub fn cut(&mut self) {
        let Some((stop, thread)) = self.serving.take() else { return };
        stop.cancel();
        thread.join().unwrap();
        std::fs::remove_file(&self.socket).unwrap();
    }

    /// Listens again, with everything that was known before.
    pub fn mend(&mut self) {
        let stop = CancellationToken::new();
        let (state, socket, stopped) = (Arc::clone(&self.state), self.socket.clone(), stop.clone());
        let (listening, listens) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = UnixListener::bind(&socket).unwrap();
                listening.send(()).unwrap();
                let mut connections = JoinSet::new();
                loop {
                    tokio::select! {
                        accepted = listener.accept() => {
                            connections.spawn(serve(accepted.unwrap().0, Arc::clone(&state)));
                        }
                        () = stopped.cancelled() => return,
                    }
                }
            });
        });
        listens.recv().unwrap();
        self.serving = Some((stop, thread));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some((stop, _)) = &self.serving {
            stop.cancel();
        }
    }
}

fn registration(generation: u64, token: &str, repositories: &[(&str, &str)]) -> Registration {
    Registration {
        sandbox: SANDBOX.parse().unwrap(),
        generation,
        token: TokenHash::of(token),
        repositories: repositories
            .iter()
            .map(|(host, path)| RepositoryScope::new(host, path).unwrap())
            .collect(),
        times: LeaseTimes { heartbeat_interval: std::time::Duration::from_secs(1), ..LeaseTimes::default() },
    }
}

async fn serve(stream: UnixStream, state: Arc<State>) {
    let service = service_fn(move |request| {
        let state = Arc::clone(&state);
        async move { Ok::<_, Infallible>(answer(request, state).await.unwrap_or_else(refused)) }
    });
    let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
}

async fn answer(request: Request<Incoming>, state: Arc<State>) -> Result<Response<Body>, Refusal> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Refusal::Busy)?.to_bytes();
    let header = |name: &str| {
        parts.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
    };
    let token = header("authorization").strip_prefix("Bearer ").unwrap_or_default().to_owned();
    let sandbox = header(paths::SANDBOX_HEADER);
    let generation = header(paths::GENERATION_HEADER).parse().unwrap_or(0);
    let lease = header(paths::LEASE_HEADER);
    let caller = Caller { sandbox: &sandbox, generation, token: &token, lease: Some(&lease) };
    let now = state.clock.now();
    let mut registry = state.registry.lock().unwrap();
    let mut disk = state.disk.lock().unwrap();
    let response = match (&parts.method, parts.uri.path()) {
        (&Method::POST, paths::ATTACH) => {
            json(&registry.attach(&caller, &read::<AttachRequest>(&body), now, Timestamp::now())?)
        }
        (&Method::POST, paths::HEARTBEAT) => {
            let reply = registry.heartbeat(&caller, now)?;
            disk.heartbeats.push(read(&body));
            json(&reply)
        }
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
                let log = disk.logs.entry(piece.source).or_default();
                assert_eq!((piece.offset, piece.lost), (log.len() as u64, 0));
                log.extend(piece.bytes);
            }
            json(&batch.reply)
        }
        (&Method::POST, paths::FATAL) => {
            registry.fatal(&caller)?;
            disk.fatal.get_or_insert(read(&body));
            json(&())
        }
        (&Method::POST, paths::GIT_CREDENTIAL) => {
            let asked: GitCredentialRequest = read(&body);
            registry.credential(&caller, &asked)?;
            disk.credentials.push(asked);
            let password = Secret::new(PASSWORD.into());
            json(&GitCredential { username: USER.into(), password, known_hosts: None, expires_at: None })
        }
        (&Method::GET, paths::STREAM) => {
            let after = Some(header(paths::LAST_EVENT_ID)).filter(|id| !id.is_empty());
            registry.commands(&caller, after.as_deref(), now)?;
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
                let watched = Arc::clone(&state);
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
