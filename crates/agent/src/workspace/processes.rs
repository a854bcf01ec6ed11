//! Processes of hooks and services: started and waited for as all others of the box.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use sandglass_supervise::ports::{Exit, Program, Running, Signal, Spawn, SpawnError};

use super::Shared;
use crate::accounts::Accounts;
use crate::command::pipes;
use crate::envs;
use crate::http::router::Agent;
use crate::init::reap;
use crate::init::signal_group;
use crate::init::spawn::Launch;

pub(super) struct Processes {
    agent: Arc<Agent>,
    shared: Arc<Shared>,
}

impl Processes {
    pub(super) fn new(agent: Arc<Agent>, shared: Arc<Shared>) -> Self {
        Processes { agent, shared }
    }
}

impl Spawn for Processes {
    fn spawn(&self, program: &Program, stdout: OwnedFd, stderr: OwnedFd) -> Result<Running, SpawnError> {
        let agent = &self.agent;
        let mut env = envs::for_shells(&agent.env, &agent.env_file);
        let identity = match &program.user {
            None => agent.identity.clone(),
            Some(user) => {
                let identity =
                    Accounts::load().resolve(user).map_err(|error| SpawnError::new(error.to_string()))?;
                if let Some(home) = &identity.home {
                    env.insert("HOME".into(), home.clone());
                }
                identity
            }
        };
        self.shared.overlay(&mut env);
        env.extend(program.env.clone());
        let input = pipes::empty_input().map_err(|source| SpawnError {
            message: format!("no input for the program: {source}"),
            source: Some(source),
        })?;
        let launch = Launch {
            argv: &program.argv,
            env: &env,
            cwd: Some(program.cwd.as_ref().unwrap_or(&agent.cwd)),
            identity: Some(&identity),
            stdin: Some(input),
            stdout: Some(stdout),
            stderr: Some(stderr),
        };
        let (group, exit) = agent.reaper.spawn(launch).map_err(|error| SpawnError::new(error.to_string()))?;
        Ok(Running { group, exit: Box::pin(async move { exit.await.map_or(Exit::Code(255), ended) }) })
    }

    fn variable(&self, name: &str) -> Option<String> {
        self.agent.env.get(name).cloned()
    }

    fn signal(&self, group: i32, signal: Signal) -> bool {
        let number = match signal {
            Signal::Probe => 0,
            Signal::Term => libc::SIGTERM,
            Signal::Kill => libc::SIGKILL,
        };
        signal_group(group, number)
    }
}

pub(super) fn ended(exit: reap::Exit) -> Exit {
    match exit {
        reap::Exit::Code(code) => Exit::Code(code),
        reap::Exit::Signal { number, .. } => Exit::Signal(number),
    }
}
