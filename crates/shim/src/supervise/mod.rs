//! The shim: one process for each box, from create until the directory is gone.
//!
//! Owns the box's state, its timer, its console and its control socket. One thread, one poll loop, no call that waits
//! for the box or for a client; the few that wait for the kernel are bounded.
//! Not here: how a box is made (`launch`) and unmade (`remains`).
//! Invariant: what `state.json` says was true when it was written, and every change of it is also an event.

mod connections;
mod console;
mod egress;
mod expiry;
mod mishaps;
mod turn;
mod words;

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::process::{Signal, WaitIdStatus};
use serde_json::{Value, json};

use crate::directory::{BoxDir, ShimLock, now_ms, start_ticks};
use crate::egress::Enforcer;
use crate::host::Host;
use crate::launch::{Failure, Launched, Timings, launch};
use crate::protocol::{self, CreateReport, Notice};
use crate::remains::Remains;
use crate::spec::{BoxEvent, BoxSpec, BoxState, ExitCause, ExitRecord, MutableFacts, Phase};
use connections::{Connection, ConnectionId};
use console::Console;
use expiry::Expiry;
use mishaps::Watch;
use words::Words;

/// How long the agent may take to say that it has started.
const START_WITHIN: Duration = Duration::from_secs(30);

/// The shim's whole life. Returns the exit code of the process.
pub fn run(host: Result<&Host, String>, dir: &Path, mut report: UnixStream) -> i32 {
    let mut timings = Timings::start();
    // Only for people who look at process lists.
    let _ = rustix::thread::set_name(c"sandglass-shim");
    match begin(host, &BoxDir::new(dir), &mut timings) {
        Ok((mut shim, launched)) => {
            shim.starting = Some(Starting::new(report, launched.status, timings));
            shim.console = Some(Console::new(&shim.dir, launched.stdout, launched.stderr));
            // The agent starts meanwhile.
            shim.event("created", "the agent was executed", json!({}));
            shim.enforced(launched.egress);
            shim.serve()
        }
        Err(failure) => {
            send_report(&mut report, CreateReport::Failed { phase: failure.phase, message: failure.message });
            1
        }
    }
}

/// A create that the agent has not confirmed yet.
struct Starting {
    report: UnixStream,
    words: Words,
    deadline: Instant,
    timings: Timings,
}

impl Starting {
    fn new(report: UnixStream, status: OwnedFd, timings: Timings) -> Self {
        Self { report, words: Words::new(status), deadline: Instant::now() + START_WITHIN, timings }
    }
}

/// A removal that waits for the agent to stop by itself.
struct Removing {
    kill_at: Instant,
    waiting: Vec<ConnectionId>,
}

/// Whether the loop goes on.
enum Next {
    Continue,
    Exit(i32),
}

struct Shim {
    dir: BoxDir,
    spec: BoxSpec,
    facts: MutableFacts,
    state: BoxState,
    remains: Remains,
    listener: UnixListener,
    connections: Vec<Connection>,
    next_connection: ConnectionId,
    expiry: Expiry,
    watch: Option<Watch>,
    console: Option<Console>,
    starting: Option<Starting>,
    /// The agent's status pipe after the start, for as long as it may still say why the entrypoint will not run.
    words: Option<Words>,
    /// What it said.
    not_started: Option<Failure>,
    /// Keeps the egress policy in force, where there is one.
    enforcer: Option<Enforcer>,
    removing: Option<Removing>,
    /// Given up early only by a create that failed.
    lock: Option<ShimLock>,
}

fn begin(
    host: Result<&Host, String>,
    dir: &BoxDir,
    timings: &mut Timings,
) -> Result<(Shim, Launched), Failure> {
    let failed = |phase: &'static str| move |error: io::Error| Failure::new(phase, error);
    let lock = dir.lock().map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock => Failure::new("exists", "another shim runs for this directory"),
        _ => Failure::new("directory", error),
    })?;
    // A server may have given up on this directory between asking for a shim and its start.
    if dir.state().ok().flatten().is_some_and(|state| state.exit.is_some()) {
        return Err(Failure::new("exists", "the box of this directory has ended already"));
    }
    let host = host.map_err(|error| Failure::new("host", error))?;
    let spec = dir.spec().map_err(failed("spec"))?;
    let facts = dir.facts().map_err(failed("spec"))?;
    let state = first_state(host);
    dir.write_state(&state).map_err(failed("directory"))?;
    let listener = connections::listen(dir).map_err(failed("directory"))?;
    let expiry = Expiry::new().map_err(failed("directory"))?;
    timings.mark("directory");
    let mut shim = Shim {
        dir: dir.clone(),
        spec,
        facts,
        state,
        remains: Remains::default(),
        listener,
        connections: Vec::new(),
        next_connection: 0,
        expiry,
        watch: None,
        console: None,
        starting: None,
        words: None,
        not_started: None,
        enforcer: None,
        removing: None,
        lock: Some(lock),
    };
    match launch(host, dir, &shim.spec, &mut shim.remains, timings) {
        Ok(launched) => {
            let init = shim.remains.init.as_ref();
            shim.state.init_pid = init.map(|init| init.pid);
            shim.state.init_start_ticks = init.and_then(|init| init.start_ticks);
            Ok((shim, launched))
        }
        Err(failure) => Err(shim.undo(failure, ExitCause::CreateFailed)),
    }
}

fn first_state(host: &Host) -> BoxState {
    let pid = rustix::process::getpid().as_raw_nonzero().get();
    BoxState {
        phase: Phase::Creating,
        paused: false,
        init_pid: None,
        init_start_ticks: None,
        shim_pid: pid,
        shim_start_ticks: start_ticks(pid).unwrap_or(0),
        boot_id: host.boot_id.clone(),
        started_at_ms: None,
        exit: None,
        enforcer: None,
    }
}

impl Shim {
    /// Takes back a create. What is left afterwards is the directory and its records.
    fn undo(&mut self, mut failure: Failure, cause: ExitCause) -> Failure {
        if let Err((step, error)) = self.clear_remains() {
            failure.message.push_str(&format!("; afterwards it was not possible to {step}: {error}"));
        }
        if let Some(console) = &mut self.console {
            console.drain();
        }
        let message = format!("{}: {}", failure.phase, failure.message);
        self.note_exit(ExitRecord { code: None, signal: None, cause, message, at_ms: now_ms() });
        let _ = std::fs::remove_file(self.dir.socket());
        failure
    }

    /// The agent's status pipe has something, or has ended.
    fn status_readable(&mut self) -> Next {
        let Some(starting) = &mut self.starting else {
            self.hear_more();
            return Next::Continue;
        };
        let status = match starting.words.hear() {
            Ok(Some(status)) => status,
            Ok(None) => return Next::Continue,
            Err(error) => return self.start_failed(Failure::new("process", error)),
        };
        match status {
            words::Status::Started => self.started(),
            words::Status::Failed(failure) => self.start_failed(failure),
            words::Status::Ended => {
                let failure = Failure::new("process", "the agent ended before it had started");
                self.start_failed(failure)
            }
        }
    }

    /// What the agent says after it has started can only be that the entrypoint will not run.
    fn hear_more(&mut self) {
        let Some(words) = &mut self.words else { return };
        match words.hear() {
            Ok(None | Some(words::Status::Started)) => {}
            Ok(Some(words::Status::Failed(failure))) => self.not_started = Some(failure),
            Ok(Some(words::Status::Ended)) | Err(_) => self.words = None,
        }
    }

    fn started(&mut self) -> Next {
        let Some(mut starting) = self.starting.take() else { return Next::Continue };
        self.state.phase = Phase::Running;
        self.state.started_at_ms = Some(now_ms());
        starting.timings.mark("started");
        let written = self.dir.write_state(&self.state);
        // The server hears of it before anything that can wait.
        send_report(
            &mut starting.report,
            CreateReport::Created { state: self.state.clone(), timings: starting.timings.marks },
        );
        drop(starting.report);
        self.words = Some(starting.words);
        if let Err(error) = written {
            self.complain("state.json was not written", &error);
        }
        self.watch = self.remains.cgroup.as_ref().map(Watch::new);
        self.event("started", "the agent answers", json!({}));
        self.arm_expiry();
        Next::Continue
    }

    fn start_failed(&mut self, mut failure: Failure) -> Next {
        let Some(mut starting) = self.starting.take() else { return Next::Continue };
        let cause = match failure.phase.as_str() {
            "entrypoint" => ExitCause::EntrypointFailed,
            _ => ExitCause::CreateFailed,
        };
        if let Some(console) = &mut self.console {
            console.pump();
            if failure.phase == "process" && !console.tail().is_empty() {
                failure.message.push_str(&format!(": {}", console.tail()));
            }
        }
        let failure = self.undo(failure, cause);
        if self.removing.is_none() {
            // Whoever hears of the failure removes the directory at once, which it must not while we hold it.
            self.lock = None;
        }
        send_report(
            &mut starting.report,
            CreateReport::Failed { phase: failure.phase, message: failure.message },
        );
        // Whoever asked for a removal meanwhile gets it: nothing but the directory is left.
        match self.removing.take() {
            Some(removing) => self.removed(removing.waiting),
            None => Next::Exit(1),
        }
    }

    /// The init's pidfd became readable.
    fn init_exited(&mut self) -> Next {
        let Some(status) = self.remains.init.as_ref().and_then(|init| init.reap().ok().flatten()) else {
            return Next::Continue;
        };
        let before = self.watch.as_ref().map(Watch::at_start).unwrap_or_default();
        let now = self.remains.cgroup.as_ref().map(crate::cgroup::Cgroup::mishaps).unwrap_or_default();
        let oom_killed = now.oom_kills > before.oom_kills;
        self.report_mishaps();
        self.remains.init = None;
        self.watch = None;
        if self.starting.is_some() {
            // What it had to say about itself comes first.
            if let Next::Exit(code) = self.status_readable() {
                return Next::Exit(code);
            }
        }
        let cleared = self.clear_remains();
        if let Some(console) = &mut self.console {
            console.drain();
        }
        // With a full disk it keeps trying; its memory is bounded by what pipes hold.
        self.console.take_if(|console| console.is_settled());
        self.starting = None;
        // Nobody is left who could write, so this ends.
        while self.words.is_some() {
            self.hear_more();
        }
        let mut exit = exit_record(&status, oom_killed);
        if let Some(failure) = self.not_started.take().filter(|_| exit.cause == ExitCause::Exited) {
            exit.cause = ExitCause::EntrypointFailed;
            exit.message = format!("{}: {}", failure.phase, failure.message);
        }
        self.note_exit(exit);
        if let Err((step, error)) = cleared {
            self.complain(&format!("it was not possible to {step}"), &error);
        }
        match self.removing.take() {
            Some(removing) => self.removed(removing.waiting),
            None => Next::Continue,
        }
    }

    fn clear_remains(&mut self) -> Result<(), crate::remains::Stuck> {
        // Its descriptors belong to the group, whose end would make them ready for ever.
        self.watch = None;
        let cleared = self.remains.clear();
        // The namespace goes with the last handle, after everything that was in it.
        self.enforcer = None;
        self.state.enforcer = None;
        cleared
    }

    fn note_exit(&mut self, exit: ExitRecord) {
        let (message, data) = (exit.message.clone(), json!({ "exit": exit }));
        self.state.phase = Phase::Exited;
        self.state.paused = false;
        self.state.init_pid = None;
        self.state.init_start_ticks = None;
        self.state.exit = Some(exit);
        self.write_state();
        self.event("exited", &message, data);
    }

    /// Starts a removal: lets the agent stop, or goes on at once when nothing runs or no grace is given.
    fn remove(&mut self, grace: Duration, by: Option<ConnectionId>) -> Next {
        let kill_at = Instant::now() + grace;
        let removing = self.removing.get_or_insert(Removing { kill_at, waiting: Vec::new() });
        removing.waiting.extend(by);
        removing.kill_at = removing.kill_at.min(kill_at);
        if grace.is_zero() || self.remains.init.is_none() {
            return self.finish_removal();
        }
        self.thaw();
        if let Some(init) = &self.remains.init {
            let _ = init.signal(Signal::TERM);
        }
        Next::Continue
    }

    fn finish_removal(&mut self) -> Next {
        if self.starting.is_some() {
            return self.start_failed(Failure::new("removed", "the box was removed before it had started"));
        }
        let waiting = self.removing.take().map(|removing| removing.waiting).unwrap_or_default();
        let ran = self.remains.init.is_some();
        if let Err((step, error)) = self.clear_remains() {
            let message = format!("it was not possible to {step}: {error}");
            self.complain("removal is stuck", &error);
            self.answer_all(&waiting, &message);
            return Next::Continue;
        }
        if let Some(mut console) = self.console.take() {
            console.drain();
        }
        if ran {
            let message = "killed by its removal".to_owned();
            let signal = Some(Signal::KILL.as_raw());
            self.note_exit(ExitRecord {
                code: None,
                signal,
                cause: ExitCause::Signalled,
                message,
                at_ms: now_ms(),
            });
        }
        self.removed(waiting)
    }

    fn removed(&mut self, waiting: Vec<ConnectionId>) -> Next {
        self.event("removed", "the box was removed", json!({}));
        if let Err(error) = crate::teardown::remove_dir(self.dir.path()) {
            self.answer_all(&waiting, &format!("cannot remove the directory: {error}"));
            return Next::Continue;
        }
        self.answer_all(&waiting, "");
        Next::Exit(0)
    }

    /// At the backstop: nobody removed the box in time.
    fn expire(&mut self) -> Next {
        self.reload_facts();
        if self.deadline_ms().is_none_or(|deadline| now_ms() < deadline) {
            self.arm_expiry();
            return Next::Continue;
        }
        self.event("expired", "the box outlived its expiry and nobody removed it", json!({}));
        self.remove(Duration::ZERO, None)
    }

    fn deadline_ms(&self) -> Option<i64> {
        let grace = i64::try_from(self.spec.expiry_grace_ms).unwrap_or(i64::MAX);
        Some(self.facts.expires_at_ms?.saturating_add(grace))
    }

    fn arm_expiry(&mut self) {
        if let Err(error) = self.expiry.set(self.deadline_ms()) {
            self.complain("the expiry timer was not set", &error);
        }
    }

    fn reload_facts(&mut self) {
        match self.dir.facts() {
            Ok(facts) => self.facts = facts,
            // The last known facts stay in force: an expiry must not vanish with a damaged file.
            Err(error) => self.complain("facts.json cannot be read", &error),
        }
    }

    fn thaw(&mut self) {
        if self.state.paused
            && let Some(cgroup) = &self.remains.cgroup
            && cgroup.set_frozen(crate::cgroup::Frozen::No).is_ok()
        {
            self.state.paused = false;
            self.write_state();
            self.event("resumed", "resumed to be removed", json!({}));
        }
    }

    fn write_state(&mut self) {
        if let Err(error) = self.dir.write_state(&self.state) {
            self.complain("state.json was not written", &error);
        }
    }

    /// Records an event and tells subscribers.
    fn event(&mut self, kind: &str, message: &str, data: Value) {
        let event = BoxEvent { at_ms: now_ms(), kind: kind.into(), message: message.into(), data };
        // Subscribers still hear of it when the disk is full.
        let _ = self.dir.append_event(&event);
        let notice = Notice { event, state: self.state.clone() };
        if let Ok(frame) = protocol::encode(&notice) {
            for connection in self.connections.iter_mut().filter(|connection| connection.subscribed) {
                connection.queue(&frame);
            }
        }
    }

    /// Something went wrong that stops nothing; there is no log to write to but the box's own record.
    fn complain(&mut self, what: &str, error: &io::Error) {
        self.event("warning", &format!("{what}: {error}"), json!({}));
    }
}

fn exit_record(status: &WaitIdStatus, oom_killed: bool) -> ExitRecord {
    let code = status.exit_status();
    let signal = status.terminating_signal();
    let killed = signal == Some(libc::SIGKILL) || code == Some(128 + libc::SIGKILL);
    let (cause, message) = match (code, signal) {
        _ if oom_killed && killed => (ExitCause::OutOfMemory, "ran out of memory and was killed".to_owned()),
        (Some(code), _) => (ExitCause::Exited, format!("exited with code {code}")),
        (_, Some(signal)) => (ExitCause::Signalled, format!("killed by signal {signal}")),
        _ => (ExitCause::Signalled, "ended in an unknown way".to_owned()),
    };
    ExitRecord { code, signal, cause, message, at_ms: now_ms() }
}

fn send_report(channel: &mut UnixStream, report: CreateReport) {
    // A server that is gone finds the box by its directory.
    let report = match protocol::encode(&report) {
        Ok(frame) => frame,
        Err(_) => return,
    };
    let _ = channel.set_nonblocking(false);
    let _ = channel.set_write_timeout(Some(Duration::from_secs(5)));
    let _ = channel.write_all(&report);
}
