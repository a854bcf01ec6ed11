//! `/session`: shells that keep their state from run to run.
//!
//! The runs of a session happen one after the other. Bounds: [`table::MAX_SESSIONS`] sessions of one task each, which
//! holds at most [`shell::MAX_PART`] bytes of state for the next shell and one batch of output.

mod driver;
mod run;
mod shell;
mod table;
mod worker;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use hyper::body::Incoming;
use serde_json::json;
use tokio::sync::oneshot;

use crate::envs;
use crate::events::{self, Stamp};
use crate::http::body::Body;
use crate::http::query::{Object, decode, first_json, read_bytes, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::Agent;
pub use table::Sessions;
use worker::Job;

/// Answers the routes below `/session`.
pub async fn dispatch(agent: &Arc<Agent>, method: &Method, segments: &[&str], body: Incoming) -> Outcome {
    match (method, segments) {
        (&Method::POST, ["session"]) => create(agent, body).await,
        (&Method::POST, ["session", id, "run"]) => run(agent, &decode(id, false), body).await,
        (&Method::DELETE, ["session", id]) => {
            crate::http::router::drain(body).await;
            let id = decode(id, false);
            if agent.sessions.destroy(&id).await { Ok(reply::empty()) } else { Err(unknown(&id)) }
        }
        _ => {
            crate::http::router::drain(body).await;
            Err(Failure::new(
                http::StatusCode::NOT_FOUND,
                Code::NotFound,
                format!("no such route: {method} /{}", segments.join("/")),
            ))
        }
    }
}

fn unknown(id: &str) -> Failure {
    Failure::no_context(format!("session {id} not found"))
}

/// A body that may be left out.
pub(crate) async fn optional_object(body: Incoming) -> Result<Object, Failure> {
    let bytes = read_bytes(body).await?;
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Object::new(json!({}));
    }
    match first_json(&bytes)? {
        serde_json::Value::Null => Object::new(json!({})),
        value => Object::new(value),
    }
}

/// The directory a shell is to start in, made when it is missing.
pub(crate) async fn start_directory(
    agent: &Agent,
    raw: Option<String>,
) -> Result<std::path::PathBuf, Failure> {
    let Some(raw) = raw.filter(|raw| !raw.is_empty()) else { return Ok(agent.cwd.clone()) };
    let env = envs::for_shells(&agent.env, &agent.env_file);
    let expanded = envs::expand_path(&raw, &env, &agent.home)
        .map_err(|e| Failure::invalid(format!("invalid request, validation error {e}")))?;
    if expanded.contains('\0') {
        return Err(Failure::invalid("invalid request, validation error cwd holds a NUL"));
    }
    let path = envs::clean(&agent.cwd, &expanded);
    let (uid, gid) = (agent.identity.uid, agent.identity.gid);
    let made = path.clone();
    let result = tokio::task::spawn_blocking(move || make_directory(&made, uid, gid)).await;
    match result {
        Ok(Ok(())) => Ok(path),
        Ok(Err(error)) => Err(Failure::io("create directory", &path, &error).as_runtime()),
        Err(_) => Err(Failure::runtime("create directory: the agent is stopping")),
    }
}

fn make_directory(path: &Path, uid: u32, gid: u32) -> std::io::Result<()> {
    let missing: Vec<&Path> = path.ancestors().take_while(|part| !part.exists()).collect();
    std::fs::create_dir_all(path)?;
    for part in missing {
        // Whoever the shell runs as should be able to use what was made for it.
        let _ = std::os::unix::fs::lchown(part, Some(uid), Some(gid));
    }
    Ok(())
}

async fn create(agent: &Arc<Agent>, body: Incoming) -> Outcome {
    let cwd = optional_object(body).await?.string("cwd")?;
    let cwd = start_directory(agent, cwd).await?;
    let id = agent.sessions.open(agent, cwd)?;
    Ok(reply::json(&json!({ "session_id": id })))
}

struct RunRequest {
    command: String,
    cwd: Option<String>,
    timeout: Option<Duration>,
}

impl RunRequest {
    fn parse(object: &Object) -> Result<Self, Failure> {
        let invalid =
            |message: &str| Failure::invalid(format!("invalid request, validation error {message}"));
        let command = object.string("command")?.filter(|text| !text.trim().is_empty());
        let command = command.ok_or_else(|| invalid("command is required"))?;
        if command.contains('\0') {
            return Err(invalid("command must not contain a NUL byte"));
        }
        let timeout = match object.integer("timeout")? {
            Some(millis) if millis < 0 => return Err(invalid("timeout must not be negative")),
            Some(0) | None => None,
            Some(millis) => Some(Duration::from_millis(millis.unsigned_abs())),
        };
        let cwd = object.string("cwd")?.filter(|cwd| !cwd.is_empty());
        Ok(RunRequest { command, cwd, timeout })
    }
}

async fn run(agent: &Arc<Agent>, id: &str, body: Incoming) -> Outcome {
    let request = RunRequest::parse(&Object::new(read_json(body).await?)?)?;
    let (tx, body) = Body::channel(1, None);
    let mut head = Vec::with_capacity(256);
    let stamp = Stamp::now();
    events::init(&mut head, id, &stamp);
    events::ping(&mut head, &stamp);
    // Before anybody else can send: the channel holds one chunk, so what follows waits for the client.
    let _ = tx.try_send(Ok(head.into()));
    let (started, waiting) = oneshot::channel();
    let (checked, check) = oneshot::channel();
    let by_turn = request.cwd.is_some();
    let RunRequest { command, cwd, timeout } = request;
    agent.sessions.submit(id, Job { command, cwd, timeout, tx: tx.clone(), started, checked })?;
    if by_turn {
        // What the directory means depends on the runs before, so the answer has to wait for them.
        match check.await {
            Ok(Ok(())) => {}
            Ok(Err(failure)) => return Err(failure),
            Err(_) => return Err(unknown(id)),
        }
    } else {
        tokio::spawn(run::wait_in_line(tx, waiting));
    }
    Ok(reply::event_stream(body))
}
