//! `/files` and `/directories`: the box's file system for clients.
//!
//! Blocking work runs on a small pool, never on the runtime thread, because that one is PID 1.
//! Invariant: memory use does not grow with the size of a file that is sent or received.

mod download;
mod edit;
mod glob;
mod info;
mod replace;
mod stage;
mod upload;
mod walk;

use std::path::PathBuf;
use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;

use crate::envs;
use crate::http::query::{Query, read_json};
use crate::http::reply::{self, Code, Failure, Outcome};
use crate::http::router::Agent;

pub async fn dispatch(
    agent: &Arc<Agent>,
    segments: &[&str],
    query: &Query,
    request: Request<Incoming>,
) -> Outcome {
    let method = request.method().clone();
    let scope = Scope { agent: Arc::clone(agent) };
    match (&method, segments) {
        (&Method::GET, ["files", "info"]) => info::info(scope, paths(query)).await,
        (&Method::DELETE, ["files"]) => edit::remove_files(scope, paths(query)).await,
        (&Method::POST, ["files", "mv"]) => edit::rename(scope, read_json(request.into_body()).await?).await,
        (&Method::POST, ["files", "permissions"]) => {
            edit::permissions(scope, read_json(request.into_body()).await?).await
        }
        (&Method::GET, ["files", "search"]) => walk::search(scope, query).await,
        (&Method::POST, ["files", "replace"]) => {
            let verbose =
                query.get("verbose").is_some_and(|v| matches!(v, "true" | "1" | "True" | "TRUE" | "t"));
            replace::replace(scope, read_json(request.into_body()).await?, verbose).await
        }
        (&Method::POST, ["files", "upload"]) => upload::upload(scope, request).await,
        (&Method::GET, ["files", "download"]) => download::download(scope, query, request.headers()).await,
        (&Method::GET, ["directories", "list"]) => walk::list(scope, query).await,
        (&Method::POST, ["directories"]) => {
            edit::make_directories(scope, read_json(request.into_body()).await?).await
        }
        (&Method::DELETE, ["directories"]) => edit::remove_directories(scope, paths(query)).await,
        _ => Err(Failure::new(
            StatusCode::NOT_FOUND,
            Code::NotFound,
            format!("no such route: {method} {}", request.uri().path()),
        )),
    }
}

fn paths(query: &Query) -> Vec<String> {
    query.all("path").map(str::to_owned).collect()
}

/// Whose view of the file system a request has.
#[derive(Clone)]
struct Scope {
    agent: Arc<Agent>,
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
        Ok(envs::clean(&self.agent.cwd, &expanded))
    }

    /// The owner of what a request creates without saying whose it is; `None` when that is us anyway.
    fn owner(&self) -> Option<(u32, u32)> {
        let identity = &self.agent.identity;
        (identity.uid != 0 || identity.gid != 0).then_some((identity.uid, identity.gid))
    }
}

/// Runs file system work off the runtime thread.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, Failure> + Send + 'static,
) -> Result<T, Failure> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(Failure::runtime("file operation was aborted")),
    }
}

async fn blocking_empty(work: impl FnOnce() -> Result<(), Failure> + Send + 'static) -> Outcome {
    blocking(work).await.map(|()| reply::empty())
}
