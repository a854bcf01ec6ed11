//! This binary started again for what PID 1 does not do itself.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::fd::OwnedFd;

use rustix::fs::{MemfdFlags, memfd_create};
use sandglass_supervise::ports::SpawnError;
use serde::Serialize;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use crate::accounts::Identity;
use crate::command::pipes;
use crate::envs::Env;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::spawn::Launch;

const OWN_PROGRAM: &str = "/proc/self/exe";

/// A helper that runs. It leads its group, and dies with the agent.
pub(super) struct Helper {
    pub(super) pid: i32,
    pub(super) exit: oneshot::Receiver<Exit>,
    pub(super) stdout: pipe::Receiver,
    pub(super) stderr: pipe::Receiver,
}

/// Starts the helper of that name, as that user or as the agent's own, with `task` to read.
pub(super) fn start(
    agent: &Agent,
    word: &str,
    task: &impl Serialize,
    env: &Env,
    identity: Option<&Identity>,
) -> Result<Helper, SpawnError> {
    let wrong =
        |source| SpawnError { message: format!("the agent's {word}: {source}"), source: Some(source) };
    let input = input(task).map_err(wrong)?;
    let (stdout, out) = pipes::pipe().map_err(wrong)?;
    let (stderr, err) = pipes::pipe().map_err(wrong)?;
    let launch = Launch {
        argv: &[OWN_PROGRAM.to_owned(), word.to_owned()],
        env,
        cwd: Some("/".as_ref()),
        identity,
        stdin: Some(input),
        stdout: Some(out),
        stderr: Some(err),
    };
    let (pid, exit) = agent
        .reaper
        .spawn_dependent(launch)
        .map_err(|error| SpawnError::new(format!("the agent's {word}: {error}")))?;
    Ok(Helper { pid, exit, stdout, stderr })
}

/// In memory, whatever its size, and nobody else's.
fn input(task: &impl Serialize) -> std::io::Result<OwnedFd> {
    let mut file = File::from(memfd_create("task", MemfdFlags::CLOEXEC)?);
    file.write_all(&serde_json::to_vec(task)?)?;
    file.rewind()?;
    Ok(file.into())
}
