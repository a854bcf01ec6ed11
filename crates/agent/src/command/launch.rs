//! From a checked request to a started process: environment layers, directory, identity, shell.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use tokio::sync::oneshot;

use super::request::{CommandRequest, What};
use crate::accounts::{Accounts, Identity};
use crate::envs::{self, Env};
use crate::http::reply::Failure;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::spawn::{Launch, LaunchError, find_shell};

/// A process that can be started, or the reason why its start will fail once the stream is open.
pub(super) struct Prepared {
    argv: Result<Vec<String>, &'static str>,
    env: Env,
    cwd: PathBuf,
    identity: Identity,
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
pub(super) fn prepare(agent: &Agent, request: &CommandRequest) -> Result<Prepared, Failure> {
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
    let argv = match &request.what {
        What::Argv(argv) => Ok(argv.clone()),
        // The daemon's own PATH finds the shell: a request must not be able to swap it.
        What::Shell(text) => match find_shell(envs::search_path(&agent.env)) {
            Some(shell) => Ok(vec![shell.to_owned(), "-c".to_owned(), text.clone()]),
            None => Err("no shell (bash or sh) in this image; use argv"),
        },
    };
    let identity = match request.ids {
        Some((uid, gid)) => Accounts::load().for_ids(uid, gid),
        None => agent.identity.clone(),
    };
    Ok(Prepared { argv, env, cwd, identity })
}

pub(super) fn start(
    agent: &Agent,
    prepared: &Prepared,
    stdout: OwnedFd,
    stderr: OwnedFd,
) -> Result<(i32, oneshot::Receiver<Exit>), StartError> {
    let argv = prepared.argv.as_ref().map_err(|reason| StartError::NoShell(reason))?;
    let stdin = super::pipes::empty_input().map_err(StartError::Stdin)?;
    let launch = Launch {
        argv,
        env: &prepared.env,
        cwd: Some(&prepared.cwd),
        identity: Some(&prepared.identity),
        stdin: Some(stdin),
        stdout: Some(stdout),
        stderr: Some(stderr),
    };
    Ok(agent.reaper.spawn(launch)?)
}
