//! From a checked request to a started process: environment layers, directory, identity, shell.
//!
//! All of it looks at files of the box and runs where waiting for them holds up nobody else.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use super::request::{CommandRequest, What};
use crate::accounts::{Accounts, Identity};
use crate::envs::{self, Env};
use crate::http::reply::Failure;
use crate::http::router::Agent;
use crate::init::spawn::{LaunchError, Program, locate_shell};

/// A process that can be started, or the reason why its start will fail once the stream is open.
pub(super) struct Prepared {
    words: Result<Words, &'static str>,
    env: Env,
    cwd: PathBuf,
    identity: Identity,
}

/// What to execute; the file of a shell is known, that of an argv is looked up in the request's own PATH.
struct Words {
    file: Option<PathBuf>,
    argv: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum StartError {
    #[error("{0}")]
    NoShell(&'static str),
    #[error(transparent)]
    Launch(#[from] LaunchError),
    #[error("no descriptor left for the standard input: {0}")]
    Stdin(std::io::Error),
}

/// Checks what must be answered with a plain error, before any event is sent.
pub(super) async fn prepare(agent: &Arc<Agent>, request: &Arc<CommandRequest>) -> Result<Prepared, Failure> {
    let (agent, request) = (Arc::clone(agent), Arc::clone(request));
    let prepared = tokio::task::spawn_blocking(move || check(&agent, &request)).await;
    prepared.unwrap_or_else(|error| Err(Failure::runtime(format!("error running commands: {error}"))))
}

fn check(agent: &Agent, request: &CommandRequest) -> Result<Prepared, Failure> {
    let mut env = agent.env.clone();
    env.extend(envs::read_file(&agent.env_file, &agent.env));
    env.extend(request.envs.iter().map(|(k, v)| (k.clone(), v.clone())));
    envs::strip_secrets(&mut env);
    let cwd = match &request.cwd {
        Some(raw) => {
            let expanded = envs::expand_path(raw, &env, &agent.home)
                .map_err(|e| Failure::invalid(format!("invalid request, validation error {e}")))?;
            envs::clean(&agent.cwd, &expanded)
        }
        None => agent.cwd.clone(),
    };
    if request.cwd.is_some() && !cwd.is_dir() {
        let reason = if cwd.exists() { "is not a directory" } else { "does not exist" };
        return Err(Failure::invalid(format!(
            "invalid request, validation error cwd {} {reason}",
            cwd.display()
        )));
    }
    env.insert("PWD".into(), cwd.to_string_lossy().into_owned());
    let words = match &request.what {
        What::Argv(argv) => Ok(Words { file: None, argv: argv.clone() }),
        // The daemon's own PATH finds the shell: a request must not be able to swap it.
        What::Shell(text) => match locate_shell(envs::search_path(&agent.env)) {
            Some((shell, file)) => {
                Ok(Words { file: Some(file), argv: vec![shell.to_owned(), "-c".to_owned(), text.clone()] })
            }
            None => Err("no shell (bash or sh) in this image; use argv"),
        },
    };
    let identity = match request.ids {
        Some((uid, gid)) => Accounts::load().for_ids(uid, gid),
        None => agent.identity.clone(),
    };
    Ok(Prepared { words, env, cwd, identity })
}

impl Prepared {
    pub(super) fn program(self, stdout: OwnedFd, stderr: OwnedFd) -> Result<Program, StartError> {
        let words = self.words.map_err(StartError::NoShell)?;
        Ok(Program {
            path: words.file,
            argv: words.argv,
            env: self.env,
            cwd: self.cwd,
            identity: self.identity,
            stdin: super::pipes::empty_input().map_err(StartError::Stdin)?,
            stdout,
            stderr,
        })
    }
}
