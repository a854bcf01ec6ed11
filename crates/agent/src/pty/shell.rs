//! The process behind a terminal: a pseudo-terminal or three pipes, its input, size and signals.

use std::ffi::OsStr;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::OFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::pty::OpenptFlags;
use rustix::termios::{Winsize, tcgetpgrp, tcsetwinsize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use super::ring::Origin;
use crate::command::pipes;
use crate::envs;
use crate::http::reply::plain;
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::spawn::{Extras, Launch, Lead, locate_shell};
use crate::init::{signal_group, watch_descriptor};

const SIZE: Winsize = Winsize { ws_row: 24, ws_col: 80, ws_xpixel: 0, ws_ypixel: 0 };

/// How the shell is connected; decided when it starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    Pty,
    Pipe,
}

impl Mode {
    pub(super) fn name(self) -> &'static str {
        match self {
            Mode::Pty => "pty",
            Mode::Pipe => "pipe",
        }
    }
}

/// What connections use of a running shell.
#[derive(Clone)]
pub(super) struct Handle {
    pub pid: i32,
    pub mode: Mode,
    input: Arc<AsyncFd<OwnedFd>>,
}

/// What only the task that follows the shell uses.
pub(super) struct Following {
    pub exit: oneshot::Receiver<Exit>,
    pub sources: [Option<Source>; 2],
}

/// Somewhere output comes from.
pub(super) enum Source {
    Terminal(Arc<AsyncFd<OwnedFd>>),
    Pipe(Origin, pipe::Receiver),
}

impl Source {
    /// Reads once there is something; zero at the end. Nothing is lost when the wait is given up.
    pub(super) async fn read(&self, buffer: &mut [u8]) -> (Origin, usize) {
        match self {
            // A terminal without processes answers an error, which is its end.
            Source::Terminal(fd) => {
                let read =
                    fd.async_io(Interest::READABLE, |fd| Ok(rustix::io::read(fd, &mut *buffer)?)).await;
                (Origin::Out, read.unwrap_or(0))
            }
            Source::Pipe(origin, pipe) => loop {
                if pipe.readable().await.is_err() {
                    return (*origin, 0);
                }
                // A pipe that is never empty would keep the thread.
                tokio::task::yield_now().await;
                match pipe.try_read(buffer) {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                    read => return (*origin, read.unwrap_or(0)),
                }
            },
        }
    }
}

pub(super) fn start(
    agent: &Agent,
    cwd: &Path,
    command: Option<&str>,
    mode: Mode,
) -> Result<(Handle, Following), String> {
    let (name, program) =
        locate_shell(envs::search_path(&agent.env)).ok_or("no shell (bash or sh) in this image")?;
    let mut argv = vec![program.to_string_lossy().into_owned()];
    if name == "bash" {
        argv.extend(["--noprofile", "--norc"].map(str::to_owned));
    }
    argv.extend(command.into_iter().flat_map(|command| ["-c".to_owned(), command.to_owned()]));
    let mut env = envs::for_shells(&agent.env, &agent.env_file);
    env.insert("PWD".into(), cwd.to_string_lossy().into_owned());
    let ends = match mode {
        Mode::Pty => terminal(agent.identity.uid),
        Mode::Pipe => three_pipes(),
    };
    let Ends { input, sources, stdin, stdout, stderr } = ends?;
    let launch = Launch {
        argv: &argv,
        env: &env,
        cwd: Some(cwd),
        identity: Some(&agent.identity),
        stdin: Some(stdin),
        stdout: Some(stdout),
        stderr: Some(stderr),
    };
    let lead = if mode == Mode::Pty { Lead::Terminal } else { Lead::Session };
    let extras = Extras { lead, ..Extras::default() };
    let (pid, exit) = agent.reaper.spawn_with(launch, extras).map_err(|error| error.to_string())?;
    Ok((Handle { pid, mode, input }, Following { exit, sources }))
}

struct Ends {
    input: Arc<AsyncFd<OwnedFd>>,
    sources: [Option<Source>; 2],
    stdin: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

fn terminal(owner: u32) -> Result<Ends, String> {
    let failed = |what: &str, error: io::Error| format!("{what}: {}", plain(&error));
    let unavailable = |error: rustix::io::Errno| {
        failed(
            "no pseudo-terminal can be made in this sandbox (it needs /dev/ptmx and /dev/pts)",
            error.into(),
        )
    };
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags).map_err(unavailable)?;
    rustix::pty::unlockpt(&master).map_err(unavailable)?;
    let slave = peer(&master, flags).map_err(unavailable)?;
    // Whoever the shell runs as should be able to open its own terminal by name.
    let _ = rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(owner)), None);
    tcsetwinsize(&master, SIZE).map_err(unavailable)?;
    let clone = |fd: &OwnedFd| fd.try_clone().map_err(|error| failed("no descriptors for a terminal", error));
    let (stdin, stdout) = (clone(&slave)?, clone(&slave)?);
    let input =
        Arc::new(watch_descriptor(master).map_err(|error| failed("no descriptors for a terminal", error))?);
    let source = Source::Terminal(Arc::clone(&input));
    Ok(Ends { input, sources: [Some(source), None], stdin, stdout, stderr: slave })
}

/// The other end, by descriptor where the kernel can: a box may see another `/dev/pts`.
fn peer(master: &OwnedFd, flags: OpenptFlags) -> rustix::io::Result<OwnedFd> {
    rustix::pty::ioctl_tiocgptpeer(master, flags).or_else(|_| {
        let name = rustix::pty::ptsname(master, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        rustix::fs::open(OsStr::from_bytes(name.as_bytes()), flags, rustix::fs::Mode::empty())
    })
}

fn three_pipes() -> Result<Ends, String> {
    let failed = |error: io::Error| format!("no descriptors for a shell: {}", plain(&error));
    let (stdin, input) = pipe_with(PipeFlags::CLOEXEC).map_err(|error| failed(error.into()))?;
    let (out, stdout) = pipes::pipe().map_err(failed)?;
    let (err, stderr) = pipes::pipe().map_err(failed)?;
    let input = Arc::new(watch_descriptor(input).map_err(failed)?);
    let sources = [Some(Source::Pipe(Origin::Out, out)), Some(Source::Pipe(Origin::Err, err))];
    Ok(Ends { input, sources, stdin, stdout, stderr })
}

impl Handle {
    /// Writes some of the bytes once there is room.
    pub(super) async fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        self.input.async_io(Interest::WRITABLE, |fd| Ok(rustix::io::write(fd, bytes)?)).await
    }

    pub(super) fn resize(&self, cols: u16, rows: u16) {
        if self.mode == Mode::Pty {
            let _ = tcsetwinsize(self.input.get_ref(), Winsize { ws_col: cols, ws_row: rows, ..SIZE });
        }
    }

    /// Reaches the shell's own group and what is in front of its terminal, which is rarely the shell.
    pub(super) fn signal(&self, number: i32) {
        let front = match self.mode {
            Mode::Pty => tcgetpgrp(self.input.get_ref()).ok().map(|group| group.as_raw_nonzero().get()),
            Mode::Pipe => None,
        };
        if let Some(front) = front.filter(|front| *front != self.pid) {
            signal_group(front, number);
        }
        signal_group(self.pid, number);
    }
}
