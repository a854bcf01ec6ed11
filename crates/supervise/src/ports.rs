//! What supervision needs from the agent around it.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};
use tokio::sync::oneshot;
use tokio_util::sync::CancellationToken;

use crate::clock::Clock;
use crate::filter::Filter;
use crate::log::Logs;
use crate::report::{Events, Reporter};
use crate::service::definition::ServiceDefinition;
use crate::service::probe::Prober;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exit {
    Code(i32),
    Signal(i32),
}

impl Exit {
    pub fn is_success(self) -> bool {
        self == Exit::Code(0)
    }

    pub fn code(self) -> Option<i32> {
        match self {
            Exit::Code(code) => Some(code),
            Exit::Signal(_) => None,
        }
    }

    pub fn signal(self) -> Option<i32> {
        match self {
            Exit::Code(_) => None,
            Exit::Signal(number) => Some(number),
        }
    }
}

impl std::fmt::Display for Exit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Exit::Code(code) => write!(f, "exit status {code}"),
            Exit::Signal(number) => write!(f, "ended by signal {number}"),
        }
    }
}

/// What is sent to a group of processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Signal {
    /// Only asks whether somebody is there.
    Probe,
    Term,
    Kill,
}

/// What to start.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Program {
    /// The first word is looked up in the PATH of the box unless it is a path.
    pub argv: Vec<String>,
    /// On top of what every process of the box gets.
    pub env: BTreeMap<String, String>,
    /// The default folder of the box when none is named.
    pub cwd: Option<PathBuf>,
    /// The default user of the box when none is named.
    pub user: Option<String>,
}

/// A started process: leader of its own group, which has its number.
pub struct Running {
    pub group: i32,
    /// Completes when the leader has been waited for. Dropping it must not keep anybody from waiting.
    pub exit: Pin<Box<dyn Future<Output = Exit> + Send>>,
}

/// Why a program could not be started, in words for the person who named it.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct SpawnError {
    pub message: String,
    #[source]
    pub source: Option<io::Error>,
}

impl SpawnError {
    pub fn new(message: impl Into<String>) -> Self {
        SpawnError { message: message.into(), source: None }
    }
}

/// Starts processes and signals them. Whoever implements this waits for them; nobody here does.
pub trait Spawn: Send + Sync + 'static {
    /// Starts a program as the leader of a group of its own, with nothing to read and these two as its outputs. Called on the
    /// runtime's thread, so that a reaper there knows the process before it can collect it.
    fn spawn(&self, program: &Program, stdout: OwnedFd, stderr: OwnedFd) -> Result<Running, SpawnError>;

    /// A variable of the environment that every process of the box gets, such as PATH.
    fn variable(&self, name: &str) -> Option<String>;

    /// Signals all processes of a group that was started here; false when none is left.
    fn signal(&self, group: i32, signal: Signal) -> bool;
}

/// A service that the agent is itself, with no process of its own.
#[derive(Debug)]
pub struct BuiltinRun {
    /// Cancelled when it shall end.
    pub stop: CancellationToken,
    /// Gets why it ended; an end without an error is one like `exit 0`.
    pub ended: oneshot::Receiver<Result<(), String>>,
}

/// Starts services that are part of the agent (the SSH server, for one).
pub trait Builtins: Send + Sync + 'static {
    fn start(&self, builtin: &str, definition: &ServiceDefinition) -> Result<BuiltinRun, SpawnError>;
}

/// An agent without services of its own.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoBuiltins;

impl Builtins for NoBuiltins {
    fn start(&self, builtin: &str, _: &ServiceDefinition) -> Result<BuiltinRun, SpawnError> {
        Err(SpawnError::new(format!("this agent has no service \"{builtin}\" of its own")))
    }
}

/// Where work says that it gets on, which puts its deadline off.
pub trait Progress: Send + Sync {
    /// One line for people, already free of secrets.
    fn progress(&self, message: &str);
}

/// A sync that went wrong.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SyncFailure {
    /// A more exact reason than "the boot failed", such as `repository_auth_failed`.
    pub cause: Option<String>,
    pub message: String,
    pub exit: Option<Exit>,
    /// The end of the output, as bytes of any kind; filtered and cut to its bounds here.
    pub output: Vec<u8>,
}

/// Brings the repositories of a box to where they shall be.
#[async_trait]
pub trait Repositories: Send + Sync + 'static {
    /// `request` is what the boot plan carries, opaque here. Once cancelled, it must end its processes and return; what has not
    /// returned after the grace is dropped.
    async fn sync(
        &self,
        request: &serde_json::Value,
        progress: Arc<dyn Progress>,
        cancel: CancellationToken,
    ) -> Result<(), SyncFailure>;
}

/// Brings the user's own program up, with the input and output of the box.
#[async_trait]
pub trait Entrypoint: Send + Sync + 'static {
    async fn start(&self, program: &Program) -> Result<(), SpawnError>;
}

/// All ports that processes and services need.
#[derive(Clone)]
pub struct Ports {
    pub clock: Arc<dyn Clock>,
    pub spawn: Arc<dyn Spawn>,
    pub builtins: Arc<dyn Builtins>,
    pub prober: Arc<dyn Prober>,
    pub filter: Arc<dyn Filter>,
    pub logs: Logs,
    pub reporter: Reporter,
    pub draw: Draw,
}

impl Ports {
    /// With the runtime's clock, probes over the loopback, no services of the agent's own, and true chance.
    pub fn new(spawn: Arc<dyn Spawn>, logs: Logs, filter: Arc<dyn Filter>, events: Arc<dyn Events>) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(crate::clock::SystemClock::start());
        Ports {
            spawn: Arc::clone(&spawn),
            builtins: Arc::new(NoBuiltins),
            prober: Arc::new(crate::service::probe::LoopbackProber::new(spawn, Arc::clone(&clock))),
            filter,
            logs,
            reporter: Reporter::new(events, Arc::clone(&clock)),
            draw: Draw::default(),
            clock,
        }
    }
}

/// Chance: each draw is any number with the same likelihood.
#[derive(Clone)]
pub struct Draw(Arc<dyn Fn() -> u64 + Send + Sync>);

impl Draw {
    pub fn new(draw: impl Fn() -> u64 + Send + Sync + 'static) -> Self {
        Draw(Arc::new(draw))
    }

    pub fn next(&self) -> u64 {
        (self.0)()
    }
}

impl Default for Draw {
    fn default() -> Self {
        use std::hash::{BuildHasher, RandomState};
        // Each state has keys of its own; more than spreading restarts is not asked of it.
        Draw::new(|| RandomState::new().hash_one(0_u8))
    }
}
