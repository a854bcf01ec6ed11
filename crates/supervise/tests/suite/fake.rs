//! Processes that are only played, under a paused clock; and what both kinds of tests listen with.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use sandglass_supervise::filter::KnownSecrets;
use sandglass_supervise::log::{Limits, Logs};
use sandglass_supervise::ports::{Exit, Ports, Program, Running, Signal, Spawn, SpawnError};
use sandglass_supervise::report::{Event, Events, Report};
use sandglass_supervise::service::probe::{Prober, Target};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep_until};

/// What a played program does.
#[derive(Clone, Default)]
pub struct Act {
    /// After how long it ends by itself, and how.
    pub ends: Option<(Duration, i32)>,
    /// When it writes what.
    pub writes: Vec<(Duration, String)>,
    pub refuses_term: bool,
    /// It leaves somebody in its group who has to be killed.
    pub leaves_child: bool,
}

impl Act {
    pub fn forever() -> Self {
        Act::default()
    }

    pub fn ends(seconds: u64, code: i32) -> Self {
        Act { ends: Some((Duration::from_secs(seconds), code)), ..Act::default() }
    }

    pub fn stubborn() -> Self {
        Act { refuses_term: true, ..Act::default() }
    }

    pub fn writes(mut self, seconds: u64, text: &str) -> Self {
        self.writes.push((Duration::from_secs(seconds), text.into()));
        self
    }
}

struct Group {
    program: String,
    act: Act,
    leader: Option<oneshot::Sender<Exit>>,
    child: bool,
}

#[derive(Default)]
struct Stage {
    acts: BTreeMap<String, Act>,
    groups: BTreeMap<i32, Group>,
    last: i32,
    /// What happened to which program.
    story: Vec<(Duration, String)>,
}

/// Plays programs by the first word of their command.
#[derive(Clone)]
pub struct FakeSpawn {
    stage: Arc<Mutex<Stage>>,
    start: Instant,
}

impl FakeSpawn {
    pub fn new() -> Self {
        FakeSpawn { stage: Arc::default(), start: Instant::now() }
    }

    pub fn act(&self, program: &str, act: Act) {
        self.lock().acts.insert(program.into(), act);
    }

    /// Ends what runs of a program, as if somebody had killed it.
    pub fn kill(&self, program: &str) {
        let groups: Vec<i32> = {
            let stage = self.lock();
            stage
                .groups
                .iter()
                .filter(|(_, group)| group.program == program)
                .map(|(number, _)| *number)
                .collect()
        };
        for group in groups {
            self.end(group, Exit::Signal(9));
        }
    }

    /// How many processes of any program are left.
    pub fn alive(&self) -> usize {
        self.lock().groups.len()
    }

    /// What happened, with the seconds since the beginning.
    pub fn story(&self) -> Vec<(f64, String)> {
        self.lock().story.iter().map(|(at, what)| (at.as_secs_f64(), what.clone())).collect()
    }

    /// What happened, without the times.
    pub fn plot(&self) -> Vec<String> {
        self.lock().story.iter().map(|(_, what)| what.clone()).collect()
    }

    fn end(&self, number: i32, exit: Exit) {
        let mut stage = self.lock();
        let Some(group) = stage.groups.get_mut(&number) else { return };
        if let Some(leader) = group.leader.take() {
            let _ = leader.send(exit);
        }
        if !group.child {
            stage.groups.remove(&number);
        }
    }

    fn note(&self, what: String) {
        let at = self.start.elapsed();
        self.lock().story.push((at, what));
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn play(self, number: i32, act: Act, stdout: OwnedFd, stderr: OwnedFd) {
        let started = Instant::now();
        let mut out = File::from(stdout);
        for (at, text) in act.writes {
            sleep_until(started + at).await;
            if !self.lock().groups.contains_key(&number) {
                return;
            }
            out.write_all(text.as_bytes()).unwrap();
            // A paused clock would move on before anybody has read that.
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
        }
        match act.ends {
            Some((at, code)) => {
                sleep_until(started + at).await;
                self.end(number, Exit::Code(code));
            }
            None => {
                while self.lock().groups.contains_key(&number) {
                    sleep_until(Instant::now() + Duration::from_millis(500)).await;
                }
            }
        }
        drop((out, stderr));
    }
}

impl Spawn for FakeSpawn {
    fn spawn(&self, program: &Program, stdout: OwnedFd, stderr: OwnedFd) -> Result<Running, SpawnError> {
        let name = program.argv[0].clone();
        let Some(act) = self.lock().acts.get(&name).cloned() else {
            return Err(SpawnError::new(format!("exec: \"{name}\": executable file not found in $PATH")));
        };
        self.note(format!("{name} starts"));
        let (leader, exit) = oneshot::channel();
        let number = {
            let mut stage = self.lock();
            stage.last += 1;
            let number = stage.last;
            let (child, act) = (act.leaves_child, act.clone());
            stage.groups.insert(number, Group { program: name, act, leader: Some(leader), child });
            number
        };
        tokio::spawn(self.clone().play(number, act, stdout, stderr));
        Ok(Running { group: number, exit: Box::pin(async { exit.await.unwrap_or(Exit::Code(255)) }) })
    }

    fn variable(&self, _: &str) -> Option<String> {
        None
    }

    fn signal(&self, number: i32, signal: Signal) -> bool {
        let mut stage = self.lock();
        let Some(group) = stage.groups.get_mut(&number) else { return false };
        let (name, refuses) = (group.program.clone(), group.act.refuses_term);
        if signal == Signal::Kill {
            group.child = false;
        }
        drop(stage);
        match signal {
            Signal::Probe => {}
            Signal::Term => {
                self.note(format!("{name} is asked to end"));
                if !refuses {
                    self.end(number, Exit::Signal(15));
                }
            }
            Signal::Kill => {
                self.note(format!("{name} is killed"));
                self.end(number, Exit::Signal(9));
            }
        }
        true
    }
}

/// Probes that answer what they are told to.
#[derive(Clone)]
pub struct FakeProber {
    pub answer: watch::Sender<Result<(), String>>,
}

impl FakeProber {
    pub fn answering() -> Self {
        FakeProber { answer: watch::Sender::new(Ok(())) }
    }
}

#[async_trait]
impl Prober for FakeProber {
    async fn probe(&self, _: &Target) -> Result<(), String> {
        self.answer.borrow().clone()
    }
}

/// Keeps all reports.
#[derive(Clone, Default)]
pub struct Heard(Arc<Mutex<Vec<Report>>>);

impl Events for Heard {
    fn emit(&self, report: Report) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(report);
    }
}

impl Heard {
    pub fn reports(&self) -> Vec<Report> {
        let reports = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        for (index, report) in reports.iter().enumerate() {
            assert_eq!(report.seq, index as u64 + 1);
        }
        reports
    }

    /// Each event in a few words.
    pub fn lines(&self) -> Vec<String> {
        let line = |report: Report| match report.event {
            Event::PhaseStarted { step, .. } => format!("{step} started"),
            Event::PhaseProgress { step, message } => format!("{step}: {message}"),
            Event::PhaseFinished { step, outcome, .. } => format!("{step} {outcome:?}"),
            Event::BootWarning(failure) => format!("warning: {failure}"),
            Event::BootCompleted { warnings } => format!("completed, {warnings} warnings"),
            Event::BootFailed(failure) => format!("failed: {failure}"),
            Event::BootCancelled { phase } => format!("cancelled in {phase}"),
            Event::ServiceChanged(change) => format!("{}: {:?} -> {:?}", change.name, change.from, change.to),
            Event::RequiredServiceFailed(failure) => format!("lost: {failure}"),
        };
        self.reports().into_iter().map(line).collect()
    }
}

/// Everything that a test plays with.
pub struct World {
    pub spawn: FakeSpawn,
    pub prober: FakeProber,
    pub heard: Heard,
    pub ports: Ports,
    _folder: tempfile::TempDir,
}

pub const SECRET: &str = "s3cr3t-value";

impl World {
    pub fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let (spawn, prober, heard) = (FakeSpawn::new(), FakeProber::answering(), Heard::default());
        let logs = Logs::open(folder.path(), Limits::default()).unwrap();
        let filter = Arc::new(KnownSecrets::new([SECRET]));
        let mut ports = Ports::new(Arc::new(spawn.clone()), logs, filter, Arc::new(heard.clone()));
        ports.prober = Arc::new(prober.clone());
        // In the middle: waits are neither longer nor shorter.
        ports.draw = sandglass_supervise::ports::Draw::new(|| 200);
        World { spawn, prober, heard, ports, _folder: folder }
    }
}
