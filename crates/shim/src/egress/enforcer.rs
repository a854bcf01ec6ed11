//! One box's enforcer: made with the box, started again whenever it ends, until the box is gone.
//!
//! Owned here: what the shim keeps between two starts. The process and its control group are in [`Remains`], because they
//! are what may be left over.
//! Invariant: the namespace outlives every program in it, so that its rules go on while none runs.

use std::io;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::WaitIdStatus;

use super::log::Log;
use super::middle::Middle;
use super::start::{Ground, start};
use super::words::{Told, Words, noted};
use super::{group_of, view};
use crate::cgroup::{Cgroup, Controller};
use crate::directory::BoxDir;
use crate::host::Host;
use crate::launch::{Failure, Timings};
use crate::network::link;
use crate::remains::Remains;
use crate::spec::{BoxSpec, EgressSpec, Limits, NetworkSpec, ProcessMark};

/// The name of this part in a create that failed.
const PHASE: &str = "egress";
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// After so long without an end, an end is a first one again.
const SETTLED: Duration = Duration::from_secs(60);
/// Enough for thousands of connections that are looked into.
const USUAL_MEMORY: u64 = 256 << 20;
/// The program and what it starts; one of each is the rule.
const MOST_PROCESSES: u64 = 64;

/// See the module documentation.
pub struct Enforcer {
    middle: Middle,
    seccomp: seccompiler::BpfProgram,
    pub words: Words,
    pub log: Log,
    started_at: Instant,
    pause: Duration,
    /// When it is started again; `None` while it runs.
    pub restart_at: Option<Instant>,
    is_ready: bool,
}

impl Enforcer {
    /// Makes the namespace and its links, and starts the program in it. The box's namespace must be ready for its
    /// interface, which comes with this.
    pub fn make(
        host: &Host,
        dir: &BoxDir,
        spec: &BoxSpec,
        remains: &mut Remains,
        timings: &mut Timings,
    ) -> Result<Self, Failure> {
        let failed = |error: io::Error| Failure::new(PHASE, error);
        let (egress, network) = parts(spec).map_err(failed)?;
        let usual = host.cgroups.has(Controller::Memory).then_some(USUAL_MEMORY);
        let limits = Limits {
            cpu_millis: egress.limits.cpu_millis,
            memory_bytes: egress.limits.memory_bytes.or(usual),
            swap_bytes: None,
            pids: MOST_PROCESSES,
            ..Limits::default()
        };
        let group = Cgroup::create(&host.cgroups, &group_of(&spec.id), &limits).map_err(failed)?;
        remains.egress_cgroup = Some(group);
        view::make_directories(dir, egress.user).map_err(failed)?;
        let middle = Middle::make(egress.user).map_err(failed)?;
        timings.mark("egress-namespace");
        middle.join_host(network).map_err(failed)?;
        // Not before: a name that was taken belongs to somebody else, who must keep it.
        remains.host_interface = Some(network.host_interface.clone());
        let init = remains.init.as_ref().map_or(0, |init| init.pid);
        middle.join_box(network, init).map_err(failed)?;
        link::open_host_side(network).map_err(failed)?;
        timings.mark("egress-links");
        let mut enforcer = Self {
            middle,
            seccomp: host.seccomp.clone(),
            words: Words::new(),
            log: Log::new(dir.join("egress.log")),
            started_at: Instant::now(),
            pause: FIRST_PAUSE,
            restart_at: None,
            is_ready: false,
        };
        enforcer.start(dir, spec, remains).map_err(failed)?;
        timings.mark("egress-started");
        Ok(enforcer)
    }

    /// Waits until the program enforces, and only then lets anything through the namespace. Returns what else it said.
    pub fn await_ready(&mut self, spec: &BoxSpec, remains: &Remains) -> Result<Vec<Told>, Failure> {
        let patience = spec.egress.as_ref().map_or(0, |egress| egress.ready_within_ms);
        let deadline = Instant::now() + Duration::from_millis(patience);
        let mut told = Vec::new();
        while !self.is_ready {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let seconds = Duration::from_millis(patience).as_secs_f32();
                return Err(self.failure(&format!("it did not enforce the policy within {seconds} s")));
            }
            self.wait(left, remains).map_err(|error| Failure::new(PHASE, error))?;
            self.log.pump();
            told.extend(self.hear());
            if !self.is_ready && remains.egress_program.as_ref().is_none_or(|program| program.has_ended()) {
                self.log.pump();
                return Err(self.failure("it ended before it enforced the policy"));
            }
        }
        self.middle.forward().map_err(|error| Failure::new(PHASE, error))?;
        Ok(told)
    }

    /// What the program said; notes whether it enforces.
    pub fn hear(&mut self) -> Vec<Told> {
        let told = self.words.hear();
        self.is_ready |= told.contains(&Told::Ready);
        told
    }

    /// The program has ended: decides when another is started, and says what happened.
    pub fn ended(&mut self, status: &WaitIdStatus) -> Told {
        if self.started_at.elapsed() > SETTLED {
            self.pause = FIRST_PAUSE;
        }
        self.restart_at = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        let how = match (status.exit_status(), status.terminating_signal()) {
            (Some(code), _) => format!("exited with code {code}"),
            (_, Some(signal)) => format!("was killed by signal {signal}"),
            _ => "ended".to_owned(),
        };
        noted("enforcer-ended", &format!("the program {how}; nothing new gets out until it is back"))
    }

    /// Starts the program, for the first time or again. On failure it is tried again later.
    pub fn start(&mut self, dir: &BoxDir, spec: &BoxSpec, remains: &mut Remains) -> io::Result<()> {
        let (egress, _) = parts(spec)?;
        let cgroup = remains.egress_cgroup.as_ref().ok_or(io::ErrorKind::NotFound)?;
        let ground = Ground { dir, spec, egress, middle: &self.middle, cgroup, seccomp: &self.seccomp };
        self.started_at = Instant::now();
        self.is_ready = false;
        let started = match start(&ground) {
            Ok(started) => started,
            Err(error) => {
                self.restart_at = Some(Instant::now() + self.pause);
                self.pause = (self.pause * 2).min(LONGEST_PAUSE);
                return Err(error);
            }
        };
        remains.egress_program = Some(started.process);
        self.restart_at = None;
        self.words.listen(started.stdout)?;
        self.log.listen(started.stderr)
    }

    fn wait(&self, left: Duration, remains: &Remains) -> io::Result<()> {
        let mut fds = Vec::new();
        fds.extend(self.words.readable().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(self.log.readable().map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
        fds.extend(remains.egress_program.iter().map(|program| PollFd::new(&program.pidfd, PollFlags::IN)));
        let timeout = Timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(i64::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        match poll(&mut fds, Some(&timeout)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn failure(&self, what: &str) -> Failure {
        let tail = self.log.tail();
        let said = if tail.is_empty() { String::new() } else { format!(": {tail}") };
        Failure::new(PHASE, format!("the egress enforcer failed: {what}{said}"))
    }
}

/// What [`BoxState`](crate::spec::BoxState) says of the process.
pub fn mark(remains: &Remains) -> Option<ProcessMark> {
    let program = remains.egress_program.as_ref()?;
    Some(ProcessMark { pid: program.pid, start_ticks: program.start_ticks? })
}

fn parts(spec: &BoxSpec) -> io::Result<(&EgressSpec, &NetworkSpec)> {
    match (&spec.egress, &spec.network) {
        (Some(egress), Some(network)) => Ok((egress, network)),
        _ => Err(io::Error::new(io::ErrorKind::InvalidInput, "an egress policy needs a network")),
    }
}
