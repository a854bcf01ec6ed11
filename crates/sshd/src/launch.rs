//! The port through which sessions become processes.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::future::Future;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::pin::Pin;

use rustix::process::Signal;

/// Who a session runs as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    pub home: PathBuf,
    pub shell: PathBuf,
    /// What every program of the sandbox gets; the session's own variables come on top.
    pub env: BTreeMap<OsString, OsString>,
}

/// A program to start as leader of a session of its own (`setsid`), and so of a process group of the same number.
#[derive(Debug)]
pub struct Program {
    pub path: PathBuf,
    /// All words, the program's own name first; a login shell's begins with `-`.
    pub argv: Vec<OsString>,
    /// The whole environment.
    pub env: BTreeMap<OsString, OsString>,
    /// The home directory; one that cannot be entered is `/`.
    pub cwd: PathBuf,
    pub account: Account,
    pub stdio: Stdio,
}

/// The standard descriptors of a program.
#[derive(Debug)]
pub enum Stdio {
    Pipes {
        stdin: OwnedFd,
        stdout: OwnedFd,
        stderr: OwnedFd,
    },
    /// All three, and the controlling terminal of the new session (`TIOCSCTTY`).
    Terminal(OwnedFd),
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// 0 to 255.
    Code(i32),
    Signal {
        number: i32,
        core_dumped: bool,
    },
}

pub type ExitFuture = Pin<Box<dyn Future<Output = Exit> + Send>>;

pub struct Started {
    /// The process, its group and its kernel session.
    pub pid: i32,
    /// Ready once the process has been waited for.
    pub exit: ExitFuture,
}

/// Makes processes of the sandbox. Called where blocking is allowed, except for [`Launch::signal`].
pub trait Launch: Send + Sync + 'static {
    /// The account behind a login name; none when nobody may sign in by that name.
    fn account(&self, login: &str) -> Option<Account>;

    /// Starts a program. The error is shown to the user, who gets exit status 126 or, for a missing file, 127.
    fn start(&self, program: Program) -> io::Result<Started>;

    /// Sends a signal to every process of a group; a group that is gone is not an error.
    fn signal(&self, group: i32, signal: Signal) {
        if let Some(group) = rustix::process::Pid::from_raw(group) {
            let _ = rustix::process::kill_process_group(group, signal);
        }
    }
}
