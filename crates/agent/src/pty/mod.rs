//! `/pty`: terminals that outlive their connections.
//!
//! Bounds: [`MAX_TERMINALS`] terminals, each with a ring of at most 1 MiB that grows as it is filled; a connection
//! costs what `socket` says.

mod frames;
mod ring;
mod shell;
mod socket;
mod terminal;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;
use tokio::sync::Semaphore;

use crate::http::query::{Query, decode};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::{Agent, drain};
use crate::session::{optional_object, start_directory};
use terminal::Terminal;

const MAX_TERMINALS: usize = 64;
/// Large frames under way at a time.
const MAX_REPLAYS: usize = 4;

/// The terminals of this agent's life.
pub struct Terminals {
    table: Mutex<HashMap<String, Arc<Terminal>>>,
    replays: Semaphore,
}

impl Default for Terminals {
    fn default() -> Self {
        Terminals { table: Mutex::default(), replays: Semaphore::new(MAX_REPLAYS) }
    }
}

impl Terminals {
    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Terminal>>> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many have a shell that runs.
    pub fn running(&self) -> usize {
        self.lock().values().filter(|terminal| terminal.running()).count()
    }

    fn get(&self, id: &str) -> Result<Arc<Terminal>, Failure> {
        self.lock().get(id).map(Arc::clone).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &str) -> Failure {
    Failure::no_context(format!("terminal {id} not found"))
}

/// Answers the routes below `/pty`.
pub async fn dispatch(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let method = request.method().clone();
    match (&method, segments) {
        (&Method::POST, ["pty"]) => create(agent, request.into_body()).await,
        (&Method::GET, ["pty", id, "ws"]) => {
            let terminal = agent.terminals.get(&decode(id, false))?;
            socket::accept(agent, &terminal, query, request)
        }
        (&Method::GET, ["pty", id]) => {
            drain(request.into_body()).await;
            let terminal = agent.terminals.get(&decode(id, false))?;
            let (running, offset) = (terminal.running(), terminal.offset());
            Ok(reply::json(
                &json!({ "session_id": terminal.id, "running": running, "output_offset": offset }),
            ))
        }
        (&Method::DELETE, ["pty", id]) => {
            drain(request.into_body()).await;
            let id = decode(id, false);
            let removed = agent.terminals.lock().remove(&id);
            removed.ok_or_else(|| unknown(&id))?.destroy().await;
            Ok(reply::empty())
        }
        _ => {
            drain(request.into_body()).await;
            let path = segments.join("/");
            Err(Failure::new(
                StatusCode::NOT_FOUND,
                Code::NotFound,
                format!("no such route: {method} /{path}"),
            ))
        }
    }
}

async fn create(agent: &Arc<Agent>, body: Incoming) -> Outcome {
    let object = optional_object(body).await?;
    let command = object.string("command")?.filter(|command| !command.trim().is_empty());
    if command.as_ref().is_some_and(|command| command.contains('\0')) {
        return Err(Failure::invalid(
            "invalid request, validation error command must not contain a NUL byte",
        ));
    }
    let cwd = start_directory(agent, object.string("cwd")?).await?;
    let id = uuid::Uuid::new_v4().to_string();
    let mut table = agent.terminals.lock();
    if table.len() >= MAX_TERMINALS {
        return Err(Failure::unavailable(format!(
            "there are {MAX_TERMINALS} terminals already; delete one first"
        )));
    }
    table.insert(id.clone(), Arc::new(Terminal::new(id.clone(), cwd, command)));
    Ok(reply::json_reply(StatusCode::CREATED, &json!({ "session_id": id })))
}
