//! `/files` and `/directories`: the box's file system for clients, as the agent or as an identity that a client names.
//!
//! Blocking work runs on a small pool, never on the runtime thread, because that one is PID 1.
//! Invariant: memory use does not grow with the size of a file that is sent or received, and no client, however slow,
//! holds a thread.

mod download;
mod edit;
mod glob;
mod identity;
mod info;
pub mod multipart;
mod pieces;
pub mod range;
mod replace;
mod stage;
mod target;
mod upload;
mod walk;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{Method, Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;

use crate::envs;
use crate::http::query::{Query, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::Agent;
use crate::isolated;
use identity::Ids;

/// How long somebody who was refused is still listened to.
const LISTEN_ON: Duration = Duration::from_secs(60);

/// `/files/...` and `/directories/...`.
pub async fn dispatch(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let scope = Scope { agent: Arc::clone(agent), ids: None };
    measured(scope, segments, query, request).await
}

/// The same below `/v1/filesystem/{uid}/{gid}`, as that user and group.
pub async fn dispatch_as(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let [uid, gid, segments @ ..] = segments else { return Err(no_route(request)) };
    let possible = async {
        let scope = Scope { agent: Arc::clone(agent), ids: Some(Ids::parse(uid, gid)?) };
        // Whether it is possible at all comes first, also for a request that then touches nothing.
        scope.blocking(|| Ok(())).await.map(|()| scope)
    };
    match possible.await {
        Ok(scope) => measured(scope, segments, query, request).await,
        Err(failure) => {
            listen_on(request.into_body());
            Err(failure)
        }
    }
}

async fn measured(scope: Scope, segments: &[&str], query: &Query, request: Request<Incoming>) -> Outcome {
    let Some(operation) = Operation::of(request.method(), segments) else { return Err(no_route(request)) };
    let (agent, begun) = (Arc::clone(&scope.agent), Instant::now());
    let outcome = run(operation, scope, query, request).await;
    agent.telemetry.file_operation(operation.name(), (&outcome).into(), begun.elapsed());
    outcome
}

/// Takes the rest of what was refused: a client that is sending does not read the refusal, and loses it when the
/// connection closes under it.
fn listen_on(mut body: Incoming) {
    tokio::spawn(tokio::time::timeout(
        LISTEN_ON,
        async move { while let Some(Ok(_)) = body.frame().await {} },
    ));
}

/// What the routes do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Info,
    Delete,
    Move,
    Permissions,
    Search,
    Replace,
    Upload,
    Download,
    List,
    MakeDirectories,
    DeleteDirectories,
}

impl Operation {
    fn of(method: &Method, segments: &[&str]) -> Option<Self> {
        Some(match (method, segments) {
            (&Method::GET, ["files", "info"]) => Operation::Info,
            (&Method::DELETE, ["files"]) => Operation::Delete,
            (&Method::POST, ["files", "mv"]) => Operation::Move,
            (&Method::POST, ["files", "permissions"]) => Operation::Permissions,
            (&Method::GET, ["files", "search"]) => Operation::Search,
            (&Method::POST, ["files", "replace"]) => Operation::Replace,
            (&Method::POST, ["files", "upload"]) => Operation::Upload,
            (&Method::GET, ["files", "download"]) => Operation::Download,
            (&Method::GET, ["directories", "list"]) => Operation::List,
            (&Method::POST, ["directories"]) => Operation::MakeDirectories,
            (&Method::DELETE, ["directories"]) => Operation::DeleteDirectories,
            _ => return None,
        })
    }

    /// As the measurements call it.
    fn name(self) -> &'static str {
        match self {
            Operation::Info => "info",
            Operation::Delete => "delete",
            Operation::Move => "move",
            Operation::Permissions => "permissions",
            Operation::Search => "search",
            Operation::Replace => "replace",
            Operation::Upload => "upload",
            Operation::Download => "download",
            Operation::List => "list_directory",
            Operation::MakeDirectories => "make_directories",
            Operation::DeleteDirectories => "delete_directories",
        }
    }
}

async fn run(operation: Operation, scope: Scope, query: &Query, request: Request<Incoming>) -> Outcome {
    match operation {
        Operation::Info => info::info(scope, paths(query)).await,
        Operation::Delete => edit::remove_files(scope, paths(query)).await,
        Operation::Move => edit::rename(scope, read_json(request.into_body()).await?).await,
        Operation::Permissions => edit::permissions(scope, read_json(request.into_body()).await?).await,
        Operation::Search => walk::search(scope, query).await,
        Operation::Replace => {
            let verbose =
                query.get("verbose").is_some_and(|v| matches!(v, "true" | "1" | "True" | "TRUE" | "t"));
            replace::replace(scope, read_json(request.into_body()).await?, verbose).await
        }
        Operation::Upload => upload::upload(scope, request).await,
        Operation::Download => download::download(scope, query, request.headers()).await,
        Operation::List => walk::list(scope, query).await,
        Operation::MakeDirectories => {
            edit::make_directories(scope, read_json(request.into_body()).await?).await
        }
        Operation::DeleteDirectories => edit::remove_directories(scope, paths(query)).await,
    }
}

fn no_route(request: Request<Incoming>) -> Failure {
    let message = format!("no such route: {} {}", request.method(), request.uri().path());
    listen_on(request.into_body());
    Failure::new(StatusCode::NOT_FOUND, Code::NotFound, message)
}

fn paths(query: &Query) -> Vec<String> {
    query.all("path").map(str::to_owned).collect()
}

/// Whose view of the file system a request has.
#[derive(Clone)]
struct Scope {
    agent: Arc<Agent>,
    ids: Option<Ids>,
}

impl Scope {
    /// Expands and cleans a path from a request.
    fn path(&self, raw: &str) -> Result<PathBuf, Failure> {
        if raw.is_empty() {
            return Err(Failure::invalid("path must not be empty"));
        }
        if raw.contains('\0') {
            return Err(Failure::invalid("path must not contain a NUL byte"));
        }
        let expanded = envs::expand_path(raw, &self.agent.env, &self.agent.home)
            .map_err(|e| Failure::runtime(e.to_string()))?;
        let path = envs::clean(&self.agent.cwd, &expanded);
        let roots = &self.agent.confined_to;
        if !roots.is_empty() && !isolated::confines(roots, &path) {
            return Err(Failure::invalid(format!("{} is outside the session's directories", path.display())));
        }
        Ok(path)
    }

    /// The owner of what a request creates without saying whose it is; `None` when that is whoever creates it.
    fn owner(&self) -> Option<(u32, u32)> {
        let identity = &self.agent.identity;
        (self.ids.is_none() && (identity.uid != 0 || identity.gid != 0))
            .then_some((identity.uid, identity.gid))
    }

    /// Runs file system work off the runtime thread, as the one whose view this is.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        match self.ids {
            Some(ids) => identity::run(ids, work).await,
            None => match tokio::task::spawn_blocking(work).await {
                Ok(result) => result,
                Err(_) => Err(Failure::runtime("file operation was aborted")),
            },
        }
    }

    async fn blocking_empty(&self, work: impl FnOnce() -> Result<(), Failure> + Send + 'static) -> Outcome {
        self.blocking(work).await.map(|()| reply::empty())
    }
}
