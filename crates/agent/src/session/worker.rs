//! The task of one session: its shell, the state for the next one, and the runs in the order they came.
//!
//! A run that ends its shell (`exit`, a signal, a timeout, a client that left) leaves no trace in the state: the next
//! shell starts where the last complete run ended.
//! Invariant: the shell is given nothing before it has answered what it was given before.

use std::ffi::OsString;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant as Clock, sleep};

use super::driver;
use super::run::{Abort, Cause, Outcome, Stream, closed, killed};
use super::shell::{self, Part, Shell, Start};
use crate::command::pipes;
use crate::envs::{self, Env};
use crate::http::body::ChunkSender;
use crate::http::reply::Failure;
use crate::http::router::Agent;
use crate::init::{kin, stop};

/// What the agent itself asks of a shell takes no time unless the user made it so.
const OWN_TEXT: Duration = Duration::from_secs(10);

/// One run to do.
pub(super) struct Job {
    pub command: String,
    pub cwd: Option<String>,
    pub timeout: Option<Duration>,
    pub tx: ChunkSender,
    /// Dropped when the run's turn has come.
    pub started: oneshot::Sender<()>,
    /// Whether the directory is one.
    pub checked: oneshot::Sender<Result<(), Failure>>,
}

pub(super) struct Worker {
    agent: Arc<Agent>,
    cwd: PathBuf,
    state: Option<Vec<u8>>,
    shell: Option<Shell>,
    /// Sessions of former shells that left something running.
    former: Vec<i32>,
    closing: watch::Receiver<bool>,
}

/// Why a shell did not answer.
enum Silence {
    Aborted,
    Ended,
}

enum Refusal {
    Invalid(Failure),
    Silence(Silence),
}

impl From<Silence> for Refusal {
    fn from(silence: Silence) -> Self {
        Refusal::Silence(silence)
    }
}

impl Worker {
    pub(super) fn new(agent: Arc<Agent>, cwd: PathBuf, closing: watch::Receiver<bool>) -> Self {
        Worker { agent, cwd, state: None, shell: None, former: Vec::new(), closing }
    }

    pub(super) async fn serve(mut self, mut jobs: mpsc::Receiver<Job>) {
        let mut closing = self.closing.clone();
        loop {
            tokio::select! {
                () = closed(&mut closing) => break,
                job = jobs.recv() => match job {
                    Some(job) => self.work(job).await,
                    None => break,
                },
                () = self.idle() => {}
            }
        }
        self.kill_everything().await;
        jobs.close();
        while let Ok(job) = jobs.try_recv() {
            // Its `checked` is dropped, which answers where no stream has begun.
            Stream::new(job.tx).refuse("the session was deleted");
        }
    }

    /// Between runs, output is of nobody and a shell may end.
    async fn idle(&mut self) {
        let Some(shell) = &mut self.shell else { return std::future::pending().await };
        tokio::select! {
            _ = &mut shell.exit => self.retire(),
            () = shell::readable(&shell.out) => {
                shell.discard();
                // A pipe that is never empty would keep the thread.
                tokio::task::yield_now().await;
            }
        }
    }

    async fn work(&mut self, job: Job) {
        let Job { command, cwd, timeout, tx, started, checked } = job;
        drop(started);
        if tx.is_closed() {
            return;
        }
        let _in_use = self.agent.runs.hold();
        let mut abort = Abort {
            client: tx.clone(),
            deadline: timeout.and_then(|limit| Clock::now().checked_add(limit)),
            closing: self.closing.clone(),
        };
        let stream = Stream::new(tx);
        // A shell that ended unnoticed, or whose state kept it from starting, is replaced once.
        for _ in 0..2 {
            if let Err(message) = self.have_shell(&mut abort).await {
                let _ = checked.send(Ok(()));
                return stream.refuse(&message);
            }
            match self.enter(cwd.as_deref(), &mut abort).await {
                Ok(()) => {
                    let _ = checked.send(Ok(()));
                    return self.execute(&command, stream, abort).await;
                }
                Err(Refusal::Invalid(failure)) => {
                    let _ = checked.send(Err(failure));
                    return;
                }
                Err(Refusal::Silence(Silence::Ended)) => self.retire(),
                Err(Refusal::Silence(Silence::Aborted)) => break,
            }
        }
        let _ = checked.send(Ok(()));
        self.give_up_shell(0).await;
        stream.end(&killed());
    }

    async fn execute(&mut self, command: &str, mut stream: Stream, mut abort: Abort) {
        let Some(shell) = &mut self.shell else { return };
        shell.discard();
        let since = kin::ticks();
        if let Err(error) = shell.run(command) {
            let message = format!("no room for the command: {}", crate::http::reply::plain(&error));
            self.give_up_shell(since).await;
            return stream.refuse(&message);
        }
        match stream.pump(shell, &mut abort).await {
            Outcome::Reported(end) => {
                stream.finish(shell, &end, &mut abort).await;
                drop(abort);
                self.keep_state().await;
            }
            Outcome::Exited(end) => {
                stream.finish(shell, &end, &mut abort).await;
                self.retire();
            }
            Outcome::Aborted(Cause::Closing) => {
                self.kill_everything().await;
                stream.end(&killed());
            }
            Outcome::Aborted(Cause::ClientGone) => self.give_up_shell(since).await,
            Outcome::Aborted(Cause::Timeout) => {
                stop::end_run(shell.pid, since).await;
                stream.finish(shell, &killed(), &mut abort).await;
                self.give_up_shell(since).await;
            }
        }
    }

    /// Makes sure that there is a shell which has taken over the state.
    async fn have_shell(&mut self, abort: &mut Abort) -> Result<(), String> {
        if self.shell.is_some() {
            return Ok(());
        }
        if !self.former.is_empty() {
            self.former = stop::inhabited(&self.former).await;
        }
        for _ in 0..2 {
            self.start()?;
            match self.answer(abort).await {
                Ok(_) => return Ok(()),
                Err(Silence::Aborted) => {
                    self.give_up_shell(0).await;
                    return Err("ended before its shell had started".into());
                }
                Err(Silence::Ended) => {
                    // What was kept cannot be lived with; the directory can.
                    self.state = None;
                    self.retire();
                }
            }
        }
        Err("the shell ended while it started".into())
    }

    fn start(&mut self) -> Result<(), String> {
        if !self.cwd.is_dir() {
            self.cwd.clone_from(&self.agent.cwd);
        }
        let mut env = match &self.state {
            // The state has all variables; one that the user unset must not come back.
            Some(_) => Env::from([("PATH".into(), envs::search_path(&self.agent.env).to_owned())]),
            None => envs::for_shells(&self.agent.env, &self.agent.env_file),
        };
        env.insert("PWD".into(), self.cwd.to_string_lossy().into_owned());
        let start = Start { env: &env, cwd: &self.cwd, state: self.state.as_deref().unwrap_or_default() };
        self.shell = Some(Shell::start(&self.agent, &start)?);
        Ok(())
    }

    /// Goes where the run wants to be, by the session's own variables.
    async fn enter(&mut self, raw: Option<&str>, abort: &mut Abort) -> Result<(), Refusal> {
        let Some(raw) = raw else { return Ok(()) };
        let invalid = |message: String| {
            Refusal::Invalid(Failure::invalid(format!("invalid request, validation error {message}")))
        };
        let variables = self.look_up(raw, abort).await?;
        let expanded =
            envs::expand_path(raw, &variables, &self.agent.home).map_err(|e| invalid(e.to_string()))?;
        let path = envs::clean(&self.cwd, &expanded);
        // A dead mount holds up nobody but this session.
        let looked = path.clone();
        let look = move || (looked.is_dir(), looked.exists());
        let (is_dir, exists) = tokio::task::spawn_blocking(look).await.unwrap_or((false, false));
        if !is_dir {
            let reason = if exists { "is not a directory" } else { "does not exist" };
            return Err(invalid(format!("cwd {} {reason}", path.display())));
        }
        let text = format!("command cd -- {}", driver::quote(&path.to_string_lossy()));
        match self.ask(&text, abort).await?.as_deref() {
            Some(b"0") => {
                self.cwd = path;
                Ok(())
            }
            _ => Err(invalid(format!("cwd {} cannot be entered", path.display()))),
        }
    }

    /// The values of the variables that a path names.
    async fn look_up(&mut self, raw: &str, abort: &mut Abort) -> Result<Env, Silence> {
        let mut names = Vec::new();
        envs::expand(raw, |name| {
            if is_name(name) {
                names.push(name.to_owned());
            }
            String::new()
        });
        let mut variables = Env::new();
        let Some(shell) = self.shell.as_mut().filter(|_| !names.is_empty()) else { return Ok(variables) };
        shell.reports.forget();
        shell.prepare(&driver::query(&names, shell.dialect)).map_err(|_| Silence::Ended)?;
        for name in names {
            let part = self.answer(abort).await?.unwrap_or_default();
            if let Some(value) = part.strip_prefix(b"x") {
                variables.insert(name, String::from_utf8_lossy(value).into_owned());
            }
        }
        self.answer(abort).await?;
        Ok(variables)
    }

    /// Has a text of the agent run and returns its status.
    async fn ask(&mut self, text: &str, abort: &mut Abort) -> Result<Part, Silence> {
        let Some(shell) = &mut self.shell else { return Err(Silence::Ended) };
        shell.reports.forget();
        shell.prepare(text).map_err(|_| Silence::Ended)?;
        self.answer(abort).await
    }

    async fn answer(&mut self, abort: &mut Abort) -> Result<Part, Silence> {
        let Some(shell) = &mut self.shell else { return Err(Silence::Ended) };
        let late = sleep(OWN_TEXT);
        tokio::select! {
            part = shell.reports.next() => Ok(part),
            _ = &mut shell.exit => Err(Silence::Ended),
            _ = abort.cause() => Err(Silence::Aborted),
            () = late => Err(Silence::Aborted),
        }
    }

    /// Takes over what the shell reports after a run.
    async fn keep_state(&mut self) {
        let mut parts = [const { None::<Part> }; 3];
        let mut closing = self.closing.clone();
        let Some(shell) = &mut self.shell else { return };
        let late = sleep(OWN_TEXT);
        tokio::pin!(late);
        for part in &mut parts {
            *part = tokio::select! {
                arrived = shell.reports.next() => Some(arrived),
                _ = &mut shell.exit => return self.retire(),
                () = &mut late => None,
                () = closed(&mut closing) => return,
            };
        }
        let [Some(directory), Some(short), Some(full)] = parts else { return self.give_up_shell(0).await };
        if let Some(mut directory) = directory {
            if directory.ends_with(b"\n") {
                directory.pop();
            }
            let directory = PathBuf::from(OsString::from_vec(directory));
            if directory.is_absolute() {
                self.cwd = directory;
            }
        }
        // The old state is better than none for who has filled his shell with more than can be kept.
        if let Some(state) = full.or(short) {
            self.state = Some(state);
        }
    }

    /// The shell has ended; what it left running goes on.
    fn retire(&mut self) {
        let Some(shell) = self.shell.take() else { return };
        self.former.push(shell.pid);
        if let Some(out) = shell.out {
            tokio::spawn(pipes::discard(out));
        }
    }

    /// Ends the shell with what it started since then.
    async fn give_up_shell(&mut self, since: u64) {
        let Some(shell) = &mut self.shell else { return };
        // Without a run to end, only the shell is to go.
        let since = if since == 0 { u64::MAX } else { since };
        stop::end_run(shell.pid, since).await;
        // A shell that cannot be killed sleeps in the kernel; nobody waits for that.
        let _ = tokio::time::timeout(Duration::from_secs(2), &mut shell.exit).await;
        self.retire();
    }

    async fn kill_everything(&mut self) {
        let mut sessions = std::mem::take(&mut self.former);
        sessions.extend(self.shell.as_ref().map(|shell| shell.pid));
        if !sessions.is_empty() {
            stop::kill_all(&sessions).await;
        }
        if let Some(shell) = &mut self.shell {
            let _ = tokio::time::timeout(Duration::from_secs(2), &mut shell.exit).await;
        }
        self.retire();
        self.former.clear();
    }
}

fn is_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}
