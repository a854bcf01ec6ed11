//! One shell process of a session: starting it, giving it texts, and hearing how they ended.
//!
//! Texts lie in an unnamed file that both sides hold, so that their size costs no system call a byte; its offset is
//! shared, and set back before each text.
//! Invariant: a text is put there only after the one before it was answered. A report's part is held up to
//! [`MAX_PART`] bytes and forgotten when it is longer.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::MemfdFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;
use tokio::sync::oneshot;

use super::driver::Dialect;
use crate::command::pipes::{self, Read};
use crate::envs::{self, Env};
use crate::http::router::Agent;
use crate::init::reap::Exit;
use crate::init::spawn::{Extras, Launch, Lead, locate_shell};

/// Most of what a session may have its next shell told.
pub(super) const MAX_PART: usize = 256 << 10;

pub(super) struct Shell {
    /// Also the id of its session and group.
    pub pid: i32,
    pub dialect: Dialect,
    pub exit: oneshot::Receiver<Exit>,
    /// None after the last writer has gone.
    pub out: Option<pipe::Receiver>,
    pub reports: Reports,
    code: File,
    go: File,
}

/// What a shell starts with.
pub(super) struct Start<'a> {
    pub env: &'a Env,
    pub cwd: &'a Path,
    pub state: &'a [u8],
}

impl Shell {
    /// Starts a shell that takes over the state; it has done so when it reports a status.
    pub(super) fn start(agent: &Agent, start: &Start<'_>) -> Result<Self, String> {
        // The daemon's own PATH finds the shell: a session must not be able to swap it.
        let (name, program) =
            locate_shell(envs::search_path(&agent.env)).ok_or("no shell (bash or sh) in this image")?;
        let dialect = Dialect::of(name);
        let failed = |error: io::Error| format!("no descriptors for a shell: {}", crate::http::reply::plain(&error));
        let (out, out_write) = pipes::pipe().map_err(failed)?;
        let (reports, report_write) = pipes::pipe().map_err(failed)?;
        let (go_read, go) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let code = rustix::fs::memfd_create("session", MemfdFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let (code, go) = (File::from(code), File::from(go));
        let setup = dialect.setup(start.state);
        put(&code, &go, "s", &[&dialect.prefix(), &setup, dialect.terminator()]).map_err(failed)?;
        let numbers = dialect.numbers();
        let null = null().map_err(failed)?;
        let mut fds = vec![
            (code.try_clone().map_err(failed)?.into(), numbers.code),
            (go_read, numbers.go),
            (report_write, numbers.report),
            (out_write.try_clone().map_err(failed)?, numbers.out),
        ];
        if numbers.null != 0 {
            fds.push((null.try_clone().map_err(failed)?, numbers.null));
        }
        let argv = dialect.argv(&program);
        let launch = Launch {
            argv: &argv,
            env: start.env,
            cwd: Some(start.cwd),
            identity: Some(&agent.identity),
            stdin: Some(null),
            stdout: Some(out_write.try_clone().map_err(failed)?),
            stderr: Some(out_write),
        };
        let extras = Extras { lead: Lead::Session, fds, ..Extras::default() };
        let (pid, exit) = agent.reaper.spawn_with(launch, extras).map_err(|error| error.to_string())?;
        agent.commands.adopt(pid);
        Ok(Shell { pid, dialect, exit, out: Some(out), reports: Reports::new(reports), code, go })
    }

    /// Reads and forgets what is there, but not for ever: somebody may write all the time.
    pub(super) fn discard(&mut self) {
        for _ in 0..8 {
            let Some(pipe) = &self.out else { return };
            match pipes::try_read(pipe, |_| ()) {
                Read::Some(_) => {}
                Read::Nothing => return,
                Read::End => self.out = None,
            }
        }
    }

    /// Has the agent's own text run; its status is the next part of the reports.
    pub(super) fn prepare(&self, text: &str) -> io::Result<()> {
        put(&self.code, &self.go, "s", &[text.as_bytes(), self.dialect.terminator()])
    }

    /// Has the user's text run; status, directory and both states follow.
    pub(super) fn run(&self, text: &str) -> io::Result<()> {
        put(&self.code, &self.go, "r", &[text.as_bytes(), self.dialect.terminator()])
    }
}

fn put(mut code: &File, mut go: &File, kind: &str, parts: &[&[u8]]) -> io::Result<()> {
    code.set_len(0)?;
    let mut at = 0;
    for part in parts {
        code.write_all_at(part, at)?;
        at += part.len() as u64;
    }
    code.seek(SeekFrom::Start(0))?;
    // Two bytes always fit: those before were taken.
    go.write_all(format!("{kind}\n").as_bytes())
}

/// Waits for output; for ever when nobody is left to write any.
pub(super) async fn readable(out: &Option<pipe::Receiver>) {
    match out {
        // An error shows again on the read, which treats it as the end.
        Some(pipe) => drop(pipe.readable().await),
        None => std::future::pending().await,
    }
}

/// Input at its end that also swallows output; without `/dev` it refuses output instead, which the loop ignores.
fn null() -> io::Result<OwnedFd> {
    match File::options().read(true).write(true).open("/dev/null") {
        Ok(file) => Ok(file.into()),
        Err(_) => pipes::empty_input(),
    }
}

/// One part of a report: its bytes, or nothing when they were too many.
pub(super) type Part = Option<Vec<u8>>;

/// The parts that a shell reports, in order.
pub(super) struct Reports {
    pipe: Option<pipe::Receiver>,
    current: Vec<u8>,
    too_long: bool,
    complete: VecDeque<Part>,
}

impl Reports {
    fn new(pipe: pipe::Receiver) -> Self {
        Reports { pipe: Some(pipe), current: Vec::new(), too_long: false, complete: VecDeque::new() }
    }

    /// Waits for a part; nothing is lost when the wait is given up. Never ends once the shell cannot report any more:
    /// a program that took the shell's place may still run.
    pub(super) async fn next(&mut self) -> Part {
        loop {
            if let Some(part) = self.ready() {
                return part;
            }
            match &self.pipe {
                // An error shows again on the read, which treats it as the end.
                Some(pipe) => drop(pipe.readable().await),
                None => std::future::pending().await,
            }
        }
    }

    /// Drops what nobody asked for.
    pub(super) fn forget(&mut self) {
        while self.ready().is_some() {}
        self.current = Vec::new();
        self.too_long = false;
    }

    /// A part that is there already.
    pub(super) fn ready(&mut self) -> Option<Part> {
        while self.complete.is_empty() {
            let Some(pipe) = &self.pipe else { break };
            let (current, too_long, complete) = (&mut self.current, &mut self.too_long, &mut self.complete);
            match pipes::try_read(pipe, |bytes| split(bytes, current, too_long, complete)) {
                Read::Some(_) => {}
                Read::Nothing => break,
                Read::End => self.pipe = None,
            }
        }
        self.complete.pop_front()
    }
}

fn split(mut bytes: &[u8], current: &mut Vec<u8>, too_long: &mut bool, complete: &mut VecDeque<Part>) {
    while let Some(end) = memchr::memchr(0, bytes) {
        hold(&bytes[..end], current, too_long);
        let part = std::mem::take(current);
        complete.push_back((!std::mem::take(too_long)).then_some(part));
        bytes = &bytes[end + 1..];
    }
    hold(bytes, current, too_long);
}

fn hold(bytes: &[u8], current: &mut Vec<u8>, too_long: &mut bool) {
    if *too_long || current.len() + bytes.len() > MAX_PART {
        *too_long = true;
        *current = Vec::new();
    } else {
        current.extend_from_slice(bytes);
    }
}
