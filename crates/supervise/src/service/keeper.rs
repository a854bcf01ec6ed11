//! Keeps one service: feeds its machine, does what that says, and shows what is.
//!
//! Invariant: whatever is visible of a service was reported before, or with it.

use std::collections::BTreeMap;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use sandglass_sandbox::Timestamp;
use tokio::sync::{mpsc, oneshot, watch};

use super::definition::ServiceDefinition;
use super::instance::{Happened, Instance};
use super::machine::{Action, Change, Input, Machine, Refused};
use super::restart::Backoff;
use super::snapshot::ServiceSnapshot;
use super::state::State;
use crate::capture::SharedTail;
use crate::clock::Moment;
use crate::filter::clean;
use crate::plan::Phase;
use crate::ports::Ports;
use crate::report::{Event, Failure, Reason, ServiceChange, Step};

/// What is asked of a keeper.
pub(super) enum Ask {
    Request {
        input: Input,
        answer: oneshot::Sender<Result<(), Refused>>,
    },
    /// The box is ending: nothing is started any more, and what runs goes on for now.
    Ending,
    /// To be killed at that moment; answered when nothing of it is left.
    Stop {
        kill_at: Moment,
        done: oneshot::Sender<()>,
    },
}

/// What all services of a box share.
pub(super) struct Shared {
    /// The last change of any.
    pub(super) changed: watch::Sender<Moment>,
    /// Required services that were given up.
    pub(super) failures: watch::Sender<BTreeMap<String, Failure>>,
    /// Starts so far.
    pub(super) starts: AtomicU64,
}

/// Where a service stands among the others.
#[derive(Default)]
pub(super) struct Standing {
    /// The number of its last start, from 1.
    pub(super) started: AtomicU64,
    /// Something of it runs or will.
    pub(super) busy: AtomicBool,
}

pub(super) struct Keeper {
    definition: Arc<ServiceDefinition>,
    ports: Ports,
    shared: Arc<Shared>,
    standing: Arc<Standing>,
    shown: watch::Sender<ServiceSnapshot>,
    machine: Machine,
    instance: Option<Instance>,
    tail: Option<SharedTail>,
    started_at: Option<Timestamp>,
    changed_at: Timestamp,
    /// By when it must be gone, when the box is ending.
    kill_at: Option<Moment>,
    ending: bool,
    stopping: Vec<oneshot::Sender<()>>,
}

impl Keeper {
    pub(super) fn new(
        definition: Arc<ServiceDefinition>,
        ports: Ports,
        backoff: Backoff,
        shared: Arc<Shared>,
    ) -> (Keeper, watch::Receiver<ServiceSnapshot>, Arc<Standing>) {
        let state = if definition.enabled { State::Stopped } else { State::Disabled };
        let ready_within = std::time::Duration::from_secs(definition.ready_seconds);
        let machine = Machine::new(definition.restart, ready_within, backoff, state);
        let changed_at = ports.clock.wall();
        let snapshot = snapshot(&definition, &machine, ports.clock.now(), None, changed_at);
        let (shown, snapshots) = watch::channel(snapshot);
        let standing = Arc::new(Standing::default());
        let keeper = Keeper {
            definition,
            ports,
            shared,
            standing: Arc::clone(&standing),
            shown,
            machine,
            instance: None,
            tail: None,
            started_at: None,
            changed_at,
            kill_at: None,
            ending: false,
            stopping: Vec::new(),
        };
        (keeper, snapshots, standing)
    }

    /// Until nobody can ask for anything any more.
    pub(super) async fn run(mut self, mut asks: mpsc::Receiver<Ask>) {
        loop {
            let clock = Arc::clone(&self.ports.clock);
            let wakeup = self.machine.wakeup();
            let instance = &mut self.instance;
            let happened = async {
                match instance {
                    Some(instance) => instance.next().await,
                    None => pending().await,
                }
            };
            let ticked = async {
                match wakeup {
                    Some(at) => clock.sleep_until(at).await,
                    None => pending().await,
                }
            };
            tokio::select! {
                ask = asks.recv() => match ask {
                    Some(ask) => self.asked(ask),
                    // A run that is left behind ends by itself.
                    None => return,
                },
                happened = happened => self.happened(happened),
                () = ticked => { let _ = self.step(Input::Tick); }
            }
            if self.machine.is_idle() {
                for done in self.stopping.drain(..) {
                    let _ = done.send(());
                }
            }
        }
    }

    fn asked(&mut self, ask: Ask) {
        match ask {
            Ask::Request { input, answer } => {
                let _ = answer.send(self.step(input));
            }
            Ask::Ending => {
                self.ending = true;
                if self.instance.is_none() {
                    let _ = self.step(Input::Stop);
                }
            }
            Ask::Stop { kill_at, done } => {
                self.kill_at = Some(kill_at);
                // It has a place in every state.
                let _ = self.step(Input::Stop);
                if let Some(instance) = &self.instance {
                    instance.end(kill_at);
                }
                self.stopping.push(done);
            }
        }
    }

    fn happened(&mut self, happened: Happened) {
        let input = match happened {
            Happened::Answered => Input::Answered,
            Happened::NotYet(message) => Input::NotYet { message: self.clean(&message) },
            Happened::Unanswered(message) => Input::Unanswered { message: self.clean(&message) },
            Happened::Gone { exit, message } => {
                self.instance = None;
                if self.ending {
                    // It counts as stopped, and is not started again.
                    let _ = self.step(Input::Stop);
                }
                Input::Gone { exit, message: message.map(|message| self.clean(&message)) }
            }
        };
        // Facts are not refused.
        let _ = self.step(input);
    }

    fn step(&mut self, input: Input) -> Result<(), Refused> {
        let mut input = Some(input);
        while let Some(next) = input.take() {
            let step = self.machine.handle(next, self.ports.clock.now(), self.ports.draw.next())?;
            input = match step.action {
                Some(Action::Launch) => self.launch(),
                Some(Action::End) => {
                    let by_itself = self.ports.clock.now() + self.definition.grace();
                    if let Some(instance) = &self.instance {
                        instance.end(self.kill_at.map_or(by_itself, |kill_at| kill_at.min(by_itself)));
                    }
                    None
                }
                None => None,
            };
            // After the start, whose moment is told with it.
            if let Some(change) = step.change {
                self.changed_at = self.ports.clock.wall();
                self.report(change);
            }
        }
        self.show();
        Ok(())
    }

    fn launch(&mut self) -> Option<Input> {
        let number = self.shared.starts.fetch_add(1, Ordering::AcqRel) + 1;
        self.standing.started.store(number, Ordering::Release);
        match Instance::start(&self.ports, &self.definition) {
            Ok(instance) => {
                self.started_at = Some(self.ports.clock.wall());
                self.tail = instance.tail();
                self.instance = Some(instance);
                None
            }
            Err(failed) => {
                Some(Input::NotLaunched { message: self.clean(&failed.message), outlook: failed.outlook })
            }
        }
    }

    fn clean(&self, message: &str) -> String {
        clean(&*self.ports.filter, message)
    }

    fn show(&self) {
        self.standing.busy.store(!self.machine.is_idle(), Ordering::Release);
        let now = self.ports.clock.now();
        let fresh = snapshot(&self.definition, &self.machine, now, self.started_at, self.changed_at);
        let changed = self.shown.send_if_modified(|shown| {
            let differs = *shown != fresh;
            *shown = fresh;
            differs
        });
        if changed {
            self.shared.changed.send_replace(now);
        }
    }

    fn report(&self, change: Change) {
        let Change { from, to } = change;
        let troubled = matches!(to, State::Restarting | State::Failed);
        self.ports.reporter.report(Event::ServiceChanged(ServiceChange {
            name: self.definition.name.clone(),
            kind: self.definition.kind,
            from,
            to,
            required: self.definition.required,
            restart_count: self.machine.restarted(),
            last_exit: self.machine.last_exit(),
            started_at: self.started_at,
            error: self.machine.last_error().filter(|_| troubled).map(str::to_owned),
        }));
        if !self.definition.required {
            return;
        }
        if to == State::Failed {
            let failure = self.failure();
            self.ports.reporter.report(Event::RequiredServiceFailed(failure.clone()));
            self.shared.failures.send_modify(|failures| {
                failures.insert(self.definition.name.clone(), failure);
            });
        } else if from == State::Failed {
            self.shared.failures.send_modify(|failures| {
                failures.remove(&self.definition.name);
            });
        }
    }

    fn failure(&self) -> Failure {
        let name = &self.definition.name;
        let error = self.machine.last_error().unwrap_or("it ended");
        let message = match self.machine.restarted() {
            0 => format!("service {name}: {error}"),
            count => format!("service {name}, given up after being restarted {count} times: {error}"),
        };
        let step = Step { phase: Phase::Services, step: Some(name.clone()) };
        let tail = self.tail.as_ref().map(SharedTail::text).unwrap_or_default();
        Failure::new(Reason::ServiceFailed, step, message, self.machine.last_exit(), tail)
    }
}

fn snapshot(
    definition: &ServiceDefinition,
    machine: &Machine,
    now: Moment,
    started_at: Option<Timestamp>,
    changed_at: Timestamp,
) -> ServiceSnapshot {
    ServiceSnapshot {
        name: definition.name.clone(),
        kind: definition.kind,
        state: machine.state(),
        required: definition.required,
        port: definition.port,
        restart_count: machine.restarted(),
        restarts_left: machine.restarts_left(now),
        last_exit: machine.last_exit(),
        last_error: machine.last_error().map(str::to_owned),
        started_at,
        changed_at,
    }
}
