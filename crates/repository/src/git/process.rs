//! One run of git: its process group, its output, its end.

use std::path::Path;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{
    Pid, Resource, Rlimit, Signal, WaitId, WaitIdOptions, kill_process_group, prlimit, waitid,
};
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::access::Access;
use super::failure::{FailureClass, GitError};
use super::progress::Progress;
use super::quota::Watched;
use super::{Control, Git, Remote, fence};
use crate::redact::{RedactStream, Redactor};

/// Bytes of standard output, enough for the refs of any repository that a person works with.
const OUTPUT_LIMIT: usize = 64 * 1024 * 1024;
/// The end of standard error that is kept.
const TAIL_BYTES: usize = 8 * 1024;
const TAIL_LINES: usize = 60;
/// Memory of one program; the packs that it maps do not count. Several times what the largest repositories take.
const MEMORY: u64 = 4 << 30;
/// From the polite signal to the other one; git removes its lock files in between.
const TERM_GRACE: Duration = Duration::from_secs(2);
const TERM_POLL: Duration = Duration::from_millis(10);
/// How long a program that git left behind may hold the pipes open.
const DRAIN_GRACE: Duration = Duration::from_secs(2);

/// One call of git.
#[derive(Clone, Copy)]
pub(super) struct Call<'a> {
    pub(super) operation: &'static str,
    pub(super) remote: Remote<'a>,
    pub(super) access: &'a Access,
    /// The folder it runs in.
    pub(super) folder: &'a Path,
    /// Before the subcommand, after the fence's own.
    pub(super) configuration: &'a [(&'a str, &'a str)],
    /// Environment beside the fence's own.
    pub(super) environment: &'a [(&'a str, &'a str)],
    /// What may not become larger than a repository may be.
    pub(super) watched: Option<Watched<'a>>,
}

impl<'a> Call<'a> {
    pub(super) fn new(
        operation: &'static str,
        remote: Remote<'a>,
        access: &'a Access,
        folder: &'a Path,
    ) -> Self {
        Self { operation, remote, access, folder, configuration: &[], environment: &[], watched: None }
    }
}

/// How git ended.
pub(super) struct Ended {
    status: ExitStatus,
    pub(super) stdout: Vec<u8>,
    tail: String,
}

impl Git {
    /// Runs git and gives its standard output.
    pub(super) async fn run(
        &self,
        call: &Call<'_>,
        arguments: &[&str],
        control: Control<'_>,
    ) -> Result<String, GitError> {
        let ended = self.end_of(call, arguments, control).await?;
        if !ended.status.success() {
            return Err(GitError::of_output(call.operation, ended.tail));
        }
        Ok(String::from_utf8_lossy(&ended.stdout).into_owned())
    }

    /// Runs git where its exit status is an answer: zero is yes, one is no.
    pub(super) async fn ask(
        &self,
        call: &Call<'_>,
        arguments: &[&str],
        control: Control<'_>,
    ) -> Result<bool, GitError> {
        let ended = self.end_of(call, arguments, control).await?;
        match ended.status.code() {
            Some(0) => Ok(true),
            // 128 is git's own way of saying that an object is not there.
            Some(1 | 128) => Ok(false),
            _ => Err(GitError::of_output(call.operation, ended.tail)),
        }
    }

    async fn end_of(
        &self,
        call: &Call<'_>,
        arguments: &[&str],
        control: Control<'_>,
    ) -> Result<Ended, GitError> {
        if control.cancel.is_cancelled() {
            return Err(GitError::new(FailureClass::Cancelled, call.operation, "cancelled"));
        }
        let mut child = self
            .command(call, arguments)
            .spawn()
            .map_err(|error| GitError::io(call.operation, "cannot run the git program", &error))?;
        let group = Group::of(&child);
        group.limit_memory();
        let limit = self.settings.repository_limit;
        let mut errors = Errors::new(&Redactor::new(call.remote.secrets()), control);
        let ended = {
            let work = communicate(&mut child, &mut errors);
            tokio::select! {
                ended = work => ended.map_err(|error| GitError::io(call.operation, "cannot read what git writes", &error))?,
                () = control.cancel.cancelled() => Stopped::Cancelled.into(),
                () = tokio::time::sleep_until(control.deadline) => Stopped::Timeout.into(),
                () = outgrown(call.watched, limit) => Stopped::TooLarge.into(),
            }
        };
        let stopped = match ended {
            Communicated::Ended(status, stdout, alone) => {
                if alone {
                    group.disarm();
                }
                // A fast one is over before anybody has looked.
                if let Some(watched) = call.watched
                    && watched.exceeds(limit).await
                {
                    return Err(too_large(call.operation, limit));
                }
                return Ok(Ended { status, stdout, tail: errors.tail() });
            }
            Communicated::Stopped(stopped) => stopped,
        };
        group.end(&mut child).await;
        let (class, message) = match stopped {
            Stopped::Cancelled => (FailureClass::Cancelled, "cancelled"),
            Stopped::Timeout => (FailureClass::Timeout, "the time for it is over"),
            Stopped::TooLong => (FailureClass::Other, "git wrote more than is plausible"),
            Stopped::TooLarge => return Err(too_large(call.operation, limit)),
        };
        Err(GitError { class, operation: call.operation, message: message.into(), tail: errors.tail() })
    }

    fn command(&self, call: &Call<'_>, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.settings.program);
        command
            .env_clear()
            .envs(fence::environment(&self.settings, call.access, call.remote))
            // A folder that turns out to be no repository must not stand for one that it happens to lie in.
            .env("GIT_CEILING_DIRECTORIES", call.folder.parent().unwrap_or(call.folder))
            .envs(call.environment.iter().copied())
            .args(fence::configuration(&self.settings));
        for (name, value) in call.configuration {
            command.arg("-c").arg(format!("{name}={value}"));
        }
        command
            .args(arguments)
            .current_dir(call.folder)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .kill_on_drop(true);
        command
    }
}

/// Never without anything to be watched.
async fn outgrown(watched: Option<Watched<'_>>, limit: u64) {
    match watched {
        Some(watched) => watched.outgrows(limit).await,
        None => std::future::pending().await,
    }
}

fn too_large(operation: &'static str, limit: u64) -> GitError {
    let message = format!("the repository is larger than the {} MiB that are allowed", limit >> 20);
    GitError::new(FailureClass::Other, operation, message)
}

enum Stopped {
    Cancelled,
    Timeout,
    TooLong,
    TooLarge,
}

enum Communicated {
    /// Whether git was the last of its group to write is the third.
    Ended(ExitStatus, Vec<u8>, bool),
    Stopped(Stopped),
}

impl From<Stopped> for Communicated {
    fn from(stopped: Stopped) -> Self {
        Self::Stopped(stopped)
    }
}

async fn communicate(child: &mut Child, errors: &mut Errors<'_>) -> std::io::Result<Communicated> {
    let stdout = child.stdout.take().expect("standard output is piped");
    let stderr = child.stderr.take().expect("standard error is piped");
    let mut written = Vec::new();
    let mut too_long = false;
    let mut status = None;
    let mut alone = true;
    {
        let reading =
            async { tokio::join!(read_output(stdout, &mut written, &mut too_long), errors.read(stderr)) };
        tokio::pin!(reading);
        tokio::select! {
            (output, error) = &mut reading => output.and(error)?,
            ended = child.wait() => {
                status = Some(ended?);
                // A program that outlives git keeps the pipes open; what git itself wrote is in them already.
                match timeout(DRAIN_GRACE, reading).await {
                    Ok((output, error)) => output.and(error)?,
                    Err(_) => alone = false,
                }
            }
        }
    }
    if too_long {
        return Ok(Stopped::TooLong.into());
    }
    let status = match status {
        Some(status) => status,
        None => child.wait().await?,
    };
    Ok(Communicated::Ended(status, written, alone))
}

async fn read_output(
    mut from: impl AsyncRead + Unpin,
    into: &mut Vec<u8>,
    too_long: &mut bool,
) -> std::io::Result<()> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let read = from.read(&mut buffer).await?;
        if read == 0 {
            return Ok(());
        }
        if into.len() + read > OUTPUT_LIMIT {
            *too_long = true;
            return Ok(());
        }
        into.extend_from_slice(&buffer[..read]);
    }
}

/// Standard error: secrets out, then split into lines, of which some are progress and the last ones are kept.
struct Errors<'a> {
    filter: Option<RedactStream>,
    control: Control<'a>,
    line: Vec<u8>,
    lines: std::collections::VecDeque<String>,
    bytes: usize,
}

impl<'a> Errors<'a> {
    fn new(redactor: &Redactor, control: Control<'a>) -> Self {
        Self {
            filter: Some(redactor.stream()),
            control,
            line: Vec::new(),
            lines: std::collections::VecDeque::new(),
            bytes: 0,
        }
    }

    async fn read(&mut self, mut from: impl AsyncRead + Unpin) -> std::io::Result<()> {
        let mut buffer = vec![0; 16 * 1024];
        loop {
            let read = from.read(&mut buffer).await?;
            if read == 0 {
                return Ok(());
            }
            let clean = self.filter.as_mut().map(|filter| filter.push(&buffer[..read])).unwrap_or_default();
            self.take(&clean);
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if matches!(byte, b'\r' | b'\n') {
                self.end_line();
            } else if self.line.len() < TAIL_BYTES {
                self.line.push(*byte);
            }
        }
    }

    fn end_line(&mut self) {
        let line = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        if let Some(progress) = Progress::parse(&line) {
            (self.control.progress)(&progress);
            return;
        }
        if line.trim().is_empty() {
            return;
        }
        self.bytes += line.len() + 1;
        self.lines.push_back(line);
        while self.lines.len() > TAIL_LINES || self.bytes > TAIL_BYTES {
            let Some(dropped) = self.lines.pop_front() else { break };
            self.bytes -= dropped.len() + 1;
        }
    }

    fn tail(mut self) -> String {
        let rest = self.filter.take().map(RedactStream::finish).unwrap_or_default();
        self.take(&rest);
        self.end_line();
        self.lines.make_contiguous().join("\n")
    }
}

/// The process group of a running git. Killed when dropped, unless git has ended by itself.
struct Group(Option<Pid>);

impl Group {
    fn of(child: &Child) -> Self {
        Self(child.id().and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
    }

    /// A folder that names itself a thousand million times is unpacked in memory before its first file is there. Git has hardly begun when
    /// this reaches it, and its own programs inherit it.
    fn limit_memory(&self) {
        let limit = Rlimit { current: Some(MEMORY), maximum: Some(MEMORY) };
        // It may have ended already, or may not have as much anyway.
        let _ = self.0.map(|leader| prlimit(Some(leader), Resource::Data, limit));
    }

    fn disarm(mut self) {
        self.0 = None;
    }

    /// Ends the group politely, then by force, and collects the leader.
    async fn end(self, child: &mut Child) {
        self.signal(Signal::TERM);
        // Looked at without collecting it: as long as the leader is a zombie its number cannot become another group's.
        let exited = async {
            while self.0.is_some_and(is_running) {
                tokio::time::sleep(TERM_POLL).await;
            }
        };
        let _ = timeout(TERM_GRACE, exited).await;
        self.signal(Signal::KILL);
        let _ = child.wait().await;
        self.disarm();
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = self.0 {
            // It may have ended meanwhile, which is what was wanted.
            let _ = kill_process_group(group, signal);
        }
    }
}

fn is_running(leader: Pid) -> bool {
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    matches!(waitid(WaitId::Pid(leader), look), Ok(None))
}

impl Drop for Group {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}
