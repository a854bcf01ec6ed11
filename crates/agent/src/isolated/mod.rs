//! `/v1/isolated`: sessions with namespaces of their own inside the box.
//!
//! Owns the routes and the table of sessions. The processes of a session are the agent's own binary, which builds the
//! namespaces in the order of bubblewrap and stays as the session's init; no other program is needed.
//! Bounds: [`MAX_SESSIONS`] sessions, each with what `runs` says.

mod environment;
pub mod inside;
mod places;
mod plan;
mod request;
mod runs;
mod session;
mod wire;

use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{Method, Request, StatusCode, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::sync::OnceCell;

use crate::hardening::{Config, Status};
use crate::http::body::Body;
use crate::http::query::{Query, decode, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::{Agent, TOKEN_HEADER, drain};
use plan::Plan;
use request::{CreateRequest, RunRequest};
use session::Session;

const MAX_SESSIONS: usize = 64;

/// The sessions of this box, and what it can do for them.
pub struct Sessions {
    config: Config,
    hardening: Status,
    table: Mutex<HashMap<String, Arc<Session>>>,
    /// Found out once, by making a session: nothing else tells for sure.
    able: OnceCell<Ability>,
}

#[derive(Debug)]
struct Ability {
    /// Why there can be no sessions, if so.
    refusal: Option<String>,
    /// Why none can have a user namespace, if so.
    users_refusal: Option<String>,
}

impl Default for Sessions {
    fn default() -> Self {
        Sessions::new(Config::default(), Status::disabled())
    }
}

impl Sessions {
    pub fn new(config: Config, hardening: Status) -> Self {
        Sessions { config, hardening, table: Mutex::default(), able: OnceCell::new() }
    }

    fn table(&self) -> MutexGuard<'_, HashMap<String, Arc<Session>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn find(&self, id: &str) -> Result<Arc<Session>, Failure> {
        self.table().get(id).map(Arc::clone).ok_or_else(|| {
            Failure::new(StatusCode::NOT_FOUND, Code::SessionNotFound, format!("session not found: {id}"))
        })
    }
}

pub async fn dispatch(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let method = request.method().clone();
    let sessions = &agent.isolated;
    match (&method, segments) {
        (&Method::GET, ["capabilities"]) => capabilities(agent).await,
        (&Method::GET, ["sessions"]) => Ok(list(sessions)),
        (&Method::POST, ["session"]) => create(agent, read_json(request.into_body()).await?).await,
        (&Method::GET, ["session", id]) => state(&*sessions.find(&decode(id, false))?),
        (&Method::DELETE, ["session", id]) => delete(agent, &decode(id, false)).await,
        (&Method::POST, ["session", id, "run"]) => {
            let session = sessions.find(&decode(id, false));
            let body = read_json(request.into_body()).await;
            runs::run(agent, &session?, RunRequest::parse(body?)?)
        }
        (&Method::GET, ["session", id, "runs", run]) => {
            runs::status(&*sessions.find(&decode(id, false))?, &decode(run, false))
        }
        (&Method::GET, ["session", id, "runs", run, "logs"]) => {
            runs::logs(&*sessions.find(&decode(id, false))?, &decode(run, false), query)
        }
        (&Method::GET, ["session", id, "diff"]) | (&Method::POST, ["session", id, "commit"]) => {
            let known = sessions.find(&decode(id, false));
            drain(request.into_body()).await;
            known?;
            let message = "diff and commit of sessions are not supported";
            Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, Code::NotSupported, message))
        }
        (_, ["session", id, "files" | "directories", ..]) => match sessions.find(&decode(id, false)) {
            Ok(session) => forward(&session, request).await,
            Err(failure) => {
                drain(request.into_body()).await;
                Err(failure)
            }
        },
        _ => {
            let path = request.uri().path().to_owned();
            drain(request.into_body()).await;
            let message = format!("no such route: {method} {path}");
            Err(Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message))
        }
    }
}

/// Tries it, the first time that somebody wants to know.
async fn ability(agent: &Agent) -> &Ability {
    let sessions = &agent.isolated;
    let tried = sessions.able.get_or_init(|| async {
        let plan = |own_users: bool| Plan {
            probe: true,
            own_tmp: true,
            own_users,
            upper_root: sessions.config.upper_root.clone(),
            capabilities: crate::hardening::SESSION,
            ..Plan::default()
        };
        let refusal = session::probe(&agent.reaper, &plan(false)).await.err();
        let users_refusal = match &refusal {
            None => session::probe(&agent.reaper, &plan(true)).await.err(),
            Some(refusal) => Some(refusal.clone()),
        };
        Ability { refusal, users_refusal }
    });
    tried.await
}

/// `GET /capabilities`: 200 also when there is nothing to be had.
async fn capabilities(agent: &Agent) -> Outcome {
    let able = ability(agent).await;
    let available = able.refusal.is_none();
    let message = match (&able.refusal, &able.users_refusal) {
        (Some(refusal), _) => {
            format!(
                "isolation unavailable: {refusal}; it needs CAP_SYS_ADMIN and mounts (extension bootstrap.execd.isolation=enable)"
            )
        }
        (None, Some(refusal)) => format!("no user namespaces: {refusal}"),
        (None, None) => String::new(),
    };
    Ok(reply::json(&json!({
        "available": available,
        // Clients compare this name; what it promises is bubblewrap's layout, and `version` says who keeps it.
        "isolator": "bwrap",
        "version": format!("sandglass {} (built in)", env!("CARGO_PKG_VERSION")),
        "message": message,
        "setpriv_available": available,
        "userns_available": able.users_refusal.is_none(),
        "commit_supported": false,
        "diff_supported": false,
        "hardening": agent.isolated.hardening,
        "runtimeInit": { "version": 1 },
    })))
}

/// `POST /session`.
async fn create(agent: &Arc<Agent>, body: Value) -> Outcome {
    let request = CreateRequest::parse(body)?;
    // A task of its own: a client that leaves meanwhile leaves a session that expires, not half of one.
    let made = tokio::spawn(make(Arc::clone(agent), request)).await;
    made.unwrap_or_else(|error| Err(Failure::runtime(error.to_string())))
}

async fn make(agent: Arc<Agent>, request: CreateRequest) -> Outcome {
    let agent = &agent;
    let able = ability(agent).await;
    let unavailable = |code, message: String| Failure::new(StatusCode::SERVICE_UNAVAILABLE, code, message);
    if let Some(refusal) = &able.refusal {
        return Err(unavailable(Code::ServiceUnavailable, format!("isolation unavailable: {refusal}")));
    }
    if let Some(refusal) = able.users_refusal.as_ref().filter(|_| request.own_users) {
        return Err(unavailable(Code::NotSupported, format!("uid_mode userns is not available: {refusal}")));
    }
    if agent.isolated.table().len() >= MAX_SESSIONS {
        return Err(unavailable(Code::ServiceUnavailable, format!("{MAX_SESSIONS} sessions are open")));
    }
    let id = uuid::Uuid::new_v4().to_string();
    let plan = {
        let (agent, request, id) = (Arc::clone(agent), request.clone(), id.clone());
        tokio::task::spawn_blocking(move || places::plan(&agent, &agent.isolated.config, &request, &id)).await
    };
    let plan = plan.map_err(|error| Failure::runtime(error.to_string()))??;
    let known = session::Identity { id: id.clone(), echo: request.echo, idle_timeout: request.idle_timeout };
    let opened = Session::open(&agent.reaper, &plan, known).await;
    let session = match opened {
        Ok(session) => session,
        Err(reason) => {
            remove_upper(plan.upper).await;
            return Err(Failure::runtime(format!("the session cannot be made: {reason}")));
        }
    };
    let full = {
        let mut table = agent.isolated.table();
        let full = table.len() >= MAX_SESSIONS;
        if !full {
            table.insert(id.clone(), Arc::clone(&session));
        }
        full
    };
    if full {
        session.close().await;
        remove_upper(plan.upper).await;
        return Err(unavailable(Code::ServiceUnavailable, format!("{MAX_SESSIONS} sessions are open")));
    }
    tokio::spawn(expire(Arc::clone(agent), Arc::clone(&session)));
    let mut shape = session.echo.clone();
    shape.insert("session_id".into(), id.into());
    shape.insert("created_at".into(), session.created_at.to_string().into());
    Ok(reply::json_reply(StatusCode::CREATED, &shape))
}

/// Waits until nobody needs the session any more, and removes it if somebody else has not.
async fn expire(agent: Arc<Agent>, session: Arc<Session>) {
    session.outlived().await;
    let _ = remove(&agent, &session).await;
}

/// `DELETE /session/{id}`.
async fn delete(agent: &Agent, id: &str) -> Outcome {
    let session = agent.isolated.find(id)?;
    if remove(agent, &session).await {
        return Ok(reply::empty());
    }
    let message = "the session's processes are not gone yet; try again";
    Err(Failure::new(StatusCode::SERVICE_UNAVAILABLE, Code::ServiceUnavailable, message))
}

async fn remove(agent: &Agent, session: &Session) -> bool {
    if !session.close().await {
        return false;
    }
    if agent.isolated.table().remove(&session.id).is_some() {
        remove_upper(agent.isolated.config.upper_root.join(&session.id)).await;
    }
    true
}

async fn remove_upper(upper: std::path::PathBuf) {
    // Sessions without an overlay on disk never made it.
    let _ = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(upper)).await;
}

fn times(session: &Session) -> serde_json::Map<String, Value> {
    let mut shape = serde_json::Map::new();
    let status = if session.is_gone() { "dead" } else { "active" };
    shape.insert("status".into(), status.into());
    shape.insert("created_at".into(), session.created_at.to_string().into());
    shape.insert("last_run_at".into(), session.last_run().to_string().into());
    if let Some(left) = session.idle_left() {
        shape.insert("idle_remaining_seconds".into(), runs::seconds(left).into());
    }
    shape
}

fn list(sessions: &Sessions) -> reply::Reply {
    let mut all: Vec<Arc<Session>> = sessions.table().values().map(Arc::clone).collect();
    all.sort_by_key(|session| session.created_at);
    let shapes: Vec<Value> = all
        .iter()
        .map(|session| {
            let mut shape = times(session);
            shape.insert("session_id".into(), session.id.as_str().into());
            Value::Object(shape)
        })
        .collect();
    reply::json(&json!({ "sessions": shapes }))
}

fn state(session: &Session) -> Outcome {
    let mut shape = times(session);
    shape.extend(session.echo.clone());
    shape.insert("session_id".into(), session.id.as_str().into());
    Ok(reply::json(&shape))
}

/// Passes a file request to the process that is where the files are.
async fn forward(session: &Session, mut request: Request<Incoming>) -> Outcome {
    let gone = |_| Failure::runtime("session terminated");
    // /v1/isolated/session/{id}/files/… becomes /files/…
    let path: String = request.uri().path().split('/').skip(5).flat_map(|part| ["/", part]).collect();
    let target = match request.uri().query() {
        Some(query) => format!("{path}?{query}"),
        None => path,
    };
    *request.uri_mut() = target.parse::<Uri>().map_err(|_| Failure::invalid("not a valid request target"))?;
    *request.version_mut() = http::Version::HTTP_11;
    crate::port_proxy::remove_hop_by_hop(request.headers_mut());
    request.headers_mut().remove(TOKEN_HEADER);
    let stream = session.connect().await.map_err(gone)?;
    let handshake = http1::Builder::new().preserve_header_case(true).handshake(TokioIo::new(stream));
    let (mut sender, connection) = handshake.await.map_err(|_| Failure::runtime("session terminated"))?;
    tokio::spawn(connection);
    let answer = sender.send_request(request).await;
    let mut answer = answer.map_err(|_| Failure::runtime("session terminated"))?;
    crate::port_proxy::remove_hop_by_hop(answer.headers_mut());
    Ok(answer.map(Body::Passed))
}

/// Whether a path is one of these or below, also when its links are followed.
pub fn confines(roots: &[std::path::PathBuf], path: &Path) -> bool {
    let inside = |path: &Path| roots.iter().any(|root| path.starts_with(root));
    if !inside(path) {
        return false;
    }
    let mut existing = path;
    loop {
        match existing.canonicalize() {
            Ok(resolved) => return inside(&resolved),
            // What cannot be looked at cannot be followed either; a link that leads nowhere may lead out later.
            Err(_) if existing.symlink_metadata().is_ok_and(|meta| meta.is_symlink()) => {
                let target = std::fs::read_link(existing).unwrap_or_default();
                return inside(&crate::envs::clean(
                    existing.parent().unwrap_or(Path::new("/")),
                    &target.to_string_lossy(),
                ));
            }
            Err(_) => existing = existing.parent().unwrap_or(Path::new("/")),
        }
    }
}
