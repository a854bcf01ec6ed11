//! The route table: which path reaches which handler, and who may call at all.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use http::{Method, Request, StatusCode, header};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use super::query::{Query, decode};
use super::reply::{self, Code, Failure, Outcome, Reply};
use crate::accounts::Identity;
use crate::activity::Gauge;
use crate::binding::{self, Binding};
use crate::code::{self, Contexts};
use crate::command::{self, Commands, Output};
use crate::envs::LiveEnv;
use crate::files;
use crate::init::reap::Reaper;
use crate::isolated;
use crate::metrics::Meter;
use crate::port_proxy;
use crate::pty::{self, Terminals};
use crate::session::{self, Sessions};
use crate::standby;
use crate::telemetry::{self, Telemetry};
use crate::workspace::{self, Workspace};

pub const TOKEN_HEADER: &str = "x-execd-access-token";

/// What every handler may use; built once at start.
pub struct Agent {
    pub token: String,
    pub port: u16,
    pub binding: Binding,
    pub env: LiveEnv,
    pub env_file: PathBuf,
    pub home: String,
    pub cwd: PathBuf,
    /// Whom commands run as and files belong to when a request does not say.
    pub identity: Identity,
    pub reaper: Reaper,
    pub commands: Arc<Commands>,
    pub contexts: Contexts,
    pub output: Arc<Output>,
    pub meter: Meter,
    pub sessions: Sessions,
    pub terminals: Terminals,
    pub telemetry: Telemetry,
    pub isolated: Arc<isolated::Sessions>,
    /// Where file routes may reach; everywhere when empty.
    pub confined_to: Vec<PathBuf>,
    /// Runs of sessions and of code.
    pub runs: Gauge,
    /// Connections to ports of the box.
    pub proxied: Gauge,
    /// Set before the first request, when the box is one.
    pub workspace: OnceLock<Arc<Workspace>>,
}

/// Answers one request. Never fails: what goes wrong is an answer too.
pub async fn route(agent: &Arc<Agent>, request: Request<Incoming>, peer: SocketAddr) -> Reply {
    if !agent.telemetry.is_on() {
        return answer(agent, request, peer).await;
    }
    let mut uri = request.uri().clone();
    while let Some(inner) = port_proxy::own_port_target(&uri, agent.port) {
        uri = inner;
    }
    let (method, begun) = (request.method().clone(), Instant::now());
    let reply = answer(agent, request, peer).await;
    agent.telemetry.request(&method, telemetry::route_of(uri.path()), reply.status(), begun.elapsed());
    reply
}

async fn answer(agent: &Arc<Agent>, mut request: Request<Incoming>, peer: SocketAddr) -> Reply {
    if let Some(closed) = agent.binding.closed(request.uri().path()) {
        drain(request.into_body()).await;
        return closed;
    }
    if !binding::is_open(request.uri().path()) && !authorised(agent, &request) {
        drain(request.into_body()).await;
        return unauthorised();
    }
    // The own port through the port proxy is this very API; the path gets shorter each round.
    while let Some(inner) = port_proxy::own_port_target(request.uri(), agent.port) {
        *request.uri_mut() = inner;
    }
    if request.uri().path().starts_with("/proxy/") {
        return port_proxy::forward(request, peer, agent.proxied.hold()).await;
    }
    let path = request.uri().path();
    if path.len() > 1 && path.ends_with('/') {
        return redirect(&request);
    }
    dispatch(agent, request).await.unwrap_or_else(Failure::into_reply)
}

async fn dispatch(agent: &Arc<Agent>, request: Request<Incoming>) -> Outcome {
    let path = request.uri().path().to_owned();
    let query = Query::parse(request.uri().query());
    let method = request.method().clone();
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    match (&method, &segments[..]) {
        (&Method::GET | &Method::HEAD, ["ping"]) => Ok(binding::introduce(reply::empty())),
        (&Method::GET, ["ready"]) => binding::ready(agent),
        (_, ["internal", "init"]) => binding::initialise(agent, request).await,
        (_, ["internal", "assign"]) => standby::assign(agent, request).await,
        (&Method::POST, ["command"]) => command::run(agent, request.into_body()).await,
        (&Method::DELETE, ["command" | "code"]) => interrupt(agent, &query).await,
        (_, ["code", ..]) => code::dispatch(agent, &segments, &query, request).await,
        (&Method::GET, ["command", "status", id]) => command::status(agent, &decode(id, false)),
        (&Method::GET, ["command", id, "logs"]) => command::logs(agent, &decode(id, false), &query),
        (&Method::GET, ["metrics"]) => Ok(agent.meter.read().await),
        (&Method::GET, ["metrics", "watch"]) => Ok(agent.meter.watch()),
        (_, ["session", ..]) => session::dispatch(agent, &method, &segments, request.into_body()).await,
        (_, ["pty", ..]) => pty::dispatch(agent, &segments, &query, request).await,
        (_, ["files" | "directories", ..]) => files::dispatch(agent, &segments, &query, request).await,
        (_, ["v1", "filesystem", rest @ ..]) => files::dispatch_as(agent, rest, &query, request).await,
        (_, ["v1", "workspace", rest @ ..]) => {
            workspace::routes::dispatch(agent, rest, &query, request).await
        }
        (_, ["v1", "isolated", rest @ ..]) => isolated::dispatch(agent, rest, &query, request).await,
        _ => {
            drain(request.into_body()).await;
            let message = format!("no such route: {method} {path}");
            Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message))
        }
    }
}

/// One id names whatever is running: the code of a context, or a command.
async fn interrupt(agent: &Agent, query: &Query) -> Outcome {
    match code::interrupt(agent, query.required("id")?).await {
        Some(outcome) => outcome,
        None => command::interrupt(agent, query).await,
    }
}

/// Reads a body that nobody wants: a client that is still sending when the connection closes never sees the answer.
/// Bounded, so that sending on for ever does not help anybody.
pub async fn drain(mut body: Incoming) {
    let mut left: usize = 16 << 20;
    let read = async {
        while let Some(Ok(frame)) = body.frame().await {
            left = left.saturating_sub(frame.data_ref().map_or(0, bytes::Bytes::len));
            if left == 0 {
                return;
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(5), read).await;
}

fn authorised(agent: &Agent, request: &Request<Incoming>) -> bool {
    let given = request.headers().get(TOKEN_HEADER).map_or(&b""[..], |value| value.as_bytes());
    agent.binding.accepts(given, &agent.token)
}

fn unauthorised() -> Reply {
    #[derive(serde::Serialize)]
    struct Shape {
        error: &'static str,
    }
    let error = "Unauthorized: invalid or missing header X-EXECD-ACCESS-TOKEN";
    reply::json_reply(StatusCode::UNAUTHORIZED, &Shape { error })
}

fn redirect(request: &Request<Incoming>) -> Reply {
    let path = format!("/{}", request.uri().path().trim_matches('/'));
    let target = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    let status = match *request.method() {
        Method::GET => StatusCode::MOVED_PERMANENTLY,
        _ => StatusCode::TEMPORARY_REDIRECT,
    };
    let mut reply = reply::bare(status);
    if let Ok(target) = header::HeaderValue::try_from(target) {
        reply.headers_mut().insert(header::LOCATION, target);
    }
    reply
}
