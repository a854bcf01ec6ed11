//! One kernel, whichever way it is reached.
//!
//! The two ways differ in who owns the process; to everybody else a kernel takes code and interrupts and has news.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::direct::Direct;
use super::languages;
use super::message::Message;
use super::server::{self, Remote};
use super::spec;
use crate::envs;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::spawn::LaunchError;

/// What a kernel has to tell.
pub(super) enum News {
    Message(Message),
    /// It is gone, and why; it says nothing any more.
    Ended(String),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("{}", languages::not_installed(.0))]
    NotInstalled(String),
    #[error("the working directory {} cannot be used: {source}", .path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error("the kernel could not be started: {0}")]
    Launch(#[from] LaunchError),
    #[error("no port for the kernel: {0}")]
    Ports(io::Error),
    #[error("no place for the kernel's connection file (a writable TMPDIR or /tmp is needed): {0}")]
    ConnectionFile(io::Error),
    #[error("no descriptor left for the kernel: {0}")]
    Descriptors(io::Error),
    #[error("the kernel cannot be talked to: {0}")]
    Connect(io::Error),
    #[error("the kernel ended while it started ({}): {tail}", .exit.shell_code())]
    Ended { exit: Exit, tail: String },
    #[error("the kernel did not answer in time: {0}")]
    Slow(String),
    #[error("the Jupyter server that JUPYTER_HOST names cannot be used: {0}")]
    Server(Box<dyn std::error::Error + Send + Sync>),
}

pub(super) enum Kernel {
    Direct(Box<Direct>),
    Remote(Box<Remote>),
}

impl Kernel {
    /// The image's Jupyter server is asked first, when it has one that answers.
    pub(super) async fn start(agent: &Arc<Agent>, language: &str, cwd: &Path) -> Result<Self, StartError> {
        make_directory(agent, cwd).await?;
        if let Some(server) = server::configured(&agent.env).transpose()?
            && server.is_there().await
        {
            // The server's own directory is what it takes without one.
            let cwd = Some(cwd).filter(|cwd| *cwd != agent.cwd);
            let started = Remote::start(&server, language, cwd).await.map_err(StartError::Server)?;
            let kernel = started.ok_or_else(|| StartError::NotInstalled(language.to_owned()))?;
            return Ok(Kernel::Remote(Box::new(kernel)));
        }
        Self::start_own(agent, language, cwd).await
    }

    async fn start_own(agent: &Arc<Agent>, language: &str, cwd: &Path) -> Result<Self, StartError> {
        let env = envs::for_shells(&agent.env, &agent.env_file);
        let found = {
            let (language, env, home) = (language.to_owned(), env.clone(), agent.home.clone());
            tokio::task::spawn_blocking(move || spec::find(&language, &env, &home)).await
        };
        let not_installed = || StartError::NotInstalled(language.to_owned());
        let spec = found.ok().flatten().ok_or_else(not_installed)?;
        match Direct::start(agent, &spec, env, cwd).await {
            Ok(kernel) => Ok(Kernel::Direct(Box::new(kernel))),
            // What the last resort, a module that may not be there, ends with.
            Err(StartError::Ended { tail, .. })
                if tail.contains(&format!("No module named {}", spec.name)) =>
            {
                Err(not_installed())
            }
            Err(StartError::Launch(LaunchError::NotFound(_))) if spec.folder.as_os_str().is_empty() => {
                Err(not_installed())
            }
            Err(error) => Err(error),
        }
    }

    /// Sends code; the answer's messages name the returned id as their parent.
    pub(super) fn execute(&mut self, code: &str) -> String {
        match self {
            Kernel::Direct(kernel) => kernel.execute(code),
            Kernel::Remote(kernel) => kernel.execute(code),
        }
    }

    /// Waits for news; may be cancelled at any time.
    pub(super) async fn next(&mut self) -> News {
        match self {
            Kernel::Direct(kernel) => kernel.next().await,
            Kernel::Remote(kernel) => kernel.next().await,
        }
    }

    /// It takes no more code; its end is to be waited for.
    pub(super) fn is_leaving(&self) -> bool {
        match self {
            Kernel::Direct(kernel) => kernel.is_leaving(),
            Kernel::Remote(_) => false,
        }
    }

    pub(super) fn interrupt(&mut self) {
        match self {
            Kernel::Direct(kernel) => kernel.interrupt(),
            Kernel::Remote(kernel) => kernel.interrupt(),
        }
    }

    pub(super) async fn end(self) {
        match self {
            Kernel::Direct(kernel) => kernel.end().await,
            Kernel::Remote(kernel) => kernel.end().await,
        }
    }
}

/// The directory a context works in is made when it is not there, as the user that the code runs as.
async fn make_directory(agent: &Agent, cwd: &Path) -> Result<(), StartError> {
    let (path, uid, gid) = (cwd.to_owned(), agent.identity.uid, agent.identity.gid);
    let made = tokio::task::spawn_blocking(move || {
        let mut missing: Vec<&Path> = path.ancestors().take_while(|part| !part.exists()).collect();
        while let Some(part) = missing.pop() {
            std::fs::create_dir(part)?;
            std::os::unix::fs::chown(part, Some(uid), Some(gid))?;
        }
        if path.is_dir() { Ok(()) } else { Err(io::ErrorKind::NotADirectory.into()) }
    });
    let made = made.await.unwrap_or_else(|error| Err(io::Error::other(error)));
    made.map_err(|source| StartError::Directory { path: cwd.to_owned(), source })
}
