//! One step of a boot, with everything that may end it early.
//!
//! Invariant: a step is over when nothing of what it started in its group is left, or when it ended by itself as it should.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::deadline::{Deadline, Expired};
use crate::capture::Outputs;
use crate::clock::{Clock, Moment};
use crate::filter::Filter;
use crate::plan::StepLimits;
use crate::ports::{Exit, Ports, Program, Progress, Repositories, SpawnError, SyncFailure};
use crate::process::Child;
use crate::report::{Event, Failure, Step};
use crate::service::Services;
use crate::tail;

/// What a failed hook left running must not hold up the news of its failure.
const LEFTOVERS: Duration = Duration::from_secs(1);
/// Between two reports of progress.
const PROGRESS_EVERY: Duration = Duration::from_secs(1);

/// How a step ended.
#[derive(Debug)]
pub(super) enum Ended {
    Done,
    Failed(Trouble),
    TimedOut {
        expired: Expired,
        output_tail: String,
    },
    /// A required service was given up meanwhile.
    ServiceFailed(Failure),
    Cancelled,
}

/// What a failed step has to say.
#[derive(Debug, Default)]
pub(super) struct Trouble {
    pub(super) cause: Option<String>,
    pub(super) message: String,
    pub(super) exit: Option<Exit>,
    pub(super) output_tail: String,
}

/// Why a step is not waited for any longer.
#[derive(Debug)]
pub(super) enum Interrupt {
    Expired(Expired),
    ServiceFailed(Failure),
    Cancelled,
}

impl Interrupt {
    fn ended(self, output_tail: String) -> Ended {
        match self {
            Interrupt::Expired(expired) => Ended::TimedOut { expired, output_tail },
            Interrupt::ServiceFailed(failure) => Ended::ServiceFailed(failure),
            Interrupt::Cancelled => Ended::Cancelled,
        }
    }
}

/// Signs of life of a step.
pub(super) struct Signs<'a> {
    /// The last one.
    pub(super) moved: watch::Receiver<Moment>,
    /// What is going on, for people.
    pub(super) message: Box<dyn Fn() -> Option<String> + Send + 'a>,
}

/// Runs steps of a boot.
pub(super) struct Stepper<'a> {
    pub(super) ports: &'a Ports,
    pub(super) services: &'a Services,
    pub(super) cancel: &'a CancellationToken,
    /// When the whole boot must be over.
    pub(super) last: Moment,
    /// What interrupted work has to end.
    pub(super) grace: Duration,
}

impl Stepper<'_> {
    pub(super) fn deadline(&self, limits: StepLimits) -> Deadline {
        let cap = limits.cap_seconds.map(Duration::from_secs);
        Deadline::new(self.ports.clock.now(), Duration::from_secs(limits.timeout_seconds), cap, self.last)
    }

    /// Completes when the step must end, and reports its progress until then.
    pub(super) async fn interrupted(
        &self,
        step: &Step,
        mut deadline: Deadline,
        mut signs: Signs<'_>,
    ) -> Interrupt {
        let clock = &self.ports.clock;
        let mut next_report = clock.now();
        let (mut unreported, mut over) = (false, false);
        loop {
            let due = deadline.due();
            tokio::select! {
                biased;
                () = self.cancel.cancelled() => return Interrupt::Cancelled,
                failure = self.services.required_failure() => return Interrupt::ServiceFailed(failure),
                () = clock.sleep_until(next_report), if unreported => {
                    unreported = false;
                    next_report = clock.now() + PROGRESS_EVERY;
                    if let Some(message) = (signs.message)() {
                        self.ports.reporter.report(Event::PhaseProgress { step: step.clone(), message });
                    }
                }
                // Progress that is waiting to be reported moves the deadline when that is due.
                changed = signs.moved.changed(), if !unreported && !over => {
                    over = changed.is_err();
                    unreported = !over;
                    deadline.progress(*signs.moved.borrow_and_update());
                }
                () = clock.sleep_until(due) => {
                    deadline.progress(*signs.moved.borrow());
                    if let Some(expired) = deadline.expired(clock.now()) {
                        return Interrupt::Expired(expired);
                    }
                }
            }
        }
    }

    /// What one interrupted piece of work has to end: when the boot is over, the services need their time as well.
    fn grace_after(&self, interrupt: &Interrupt) -> Duration {
        match interrupt {
            Interrupt::Cancelled => crate::service::share(self.grace, 1 + self.services.busy(), self.grace),
            Interrupt::Expired(_) | Interrupt::ServiceFailed(_) => self.grace,
        }
    }

    /// Runs a program to its end. What it leaves running in the background after an end without a failure goes on.
    pub(super) async fn program(&self, step: &Step, program: &Program, deadline: Deadline) -> Ended {
        let source = match &step.step {
            Some(label) => format!("boot.{}.{label}", step.phase),
            None => format!("boot.{}", step.phase),
        };
        let mut child = match Child::start(self.ports, program, Some(&source), Outputs::Together) {
            Ok(child) => child,
            Err(error) => return Ended::Failed(not_started(&error)),
        };
        let tail = child.capture().shared_tail();
        let signs = {
            let tail = tail.clone();
            Signs { moved: child.capture().wrote(), message: Box::new(move || tail.message()) }
        };
        let interrupt = tokio::select! {
            biased;
            interrupt = self.interrupted(step, deadline, signs) => interrupt,
            exit = child.exited() => {
                child.capture().catch_up().await;
                if exit.is_success() {
                    return Ended::Done;
                }
                let output_tail = tail.text();
                if child.is_alive() {
                    child.stop(LEFTOVERS.min(self.grace)).await;
                }
                let message = exit.to_string();
                return Ended::Failed(Trouble { cause: None, message, exit: Some(exit), output_tail });
            }
        };
        child.stop(self.grace_after(&interrupt)).await;
        child.capture().catch_up().await;
        interrupt.ended(tail.text())
    }

    /// Has the repositories synchronised.
    pub(super) async fn sync(
        &self,
        step: &Step,
        repositories: &dyn Repositories,
        request: &serde_json::Value,
        deadline: Deadline,
    ) -> Ended {
        let progress = Arc::new(SyncProgress::new(self.ports));
        let told = Arc::clone(&progress);
        let signs = Signs { moved: progress.moved.subscribe(), message: Box::new(move || told.message()) };
        // Its own: a sync that is cancelled must not be mistaken for one that failed.
        let end = CancellationToken::new();
        let mut work = repositories.sync(request, progress, end.clone());
        let interrupt = tokio::select! {
            biased;
            interrupt = self.interrupted(step, deadline, signs) => interrupt,
            result = &mut work => return match result {
                Ok(()) => Ended::Done,
                Err(failure) => Ended::Failed(self.trouble(failure)),
            },
        };
        end.cancel();
        let until = self.ports.clock.now() + self.grace_after(&interrupt);
        let output_tail = tokio::select! {
            result = work => result.err().map(|failure| self.trouble(failure).output_tail),
            () = self.ports.clock.sleep_until(until) => None,
        };
        interrupt.ended(output_tail.unwrap_or_default())
    }

    fn trouble(&self, failure: SyncFailure) -> Trouble {
        let filter = &self.ports.filter;
        Trouble {
            cause: failure.cause,
            message: failure.message,
            exit: failure.exit,
            output_tail: tail::bounded(&filter.once(&failure.output)),
        }
    }

    /// Starts the services, and waits for those without which there is nothing to go on with.
    pub(super) async fn services(&self, step: &Step, deadline: Deadline) -> Ended {
        let services = self.services;
        let waiting = || {
            let names = services.snapshots().into_iter();
            let names = names.filter(|service| service.required && service.state.is_wanted());
            let names: Vec<String> =
                names.map(|service| format!("{} {:?}", service.name, service.state)).collect();
            Some(names.join(", "))
        };
        let signs = Signs { moved: services.changed(), message: Box::new(waiting) };
        if let Err(error) = services.start_enabled().await {
            return Ended::Failed(Trouble { message: error.to_string(), ..Trouble::default() });
        }
        self.work(step, deadline, signs, async {
            services.required_ready().await;
            Ok(())
        })
        .await
    }

    /// Anything that is simply not waited for any longer when it takes too long.
    pub(super) async fn work(
        &self,
        step: &Step,
        deadline: Deadline,
        signs: Signs<'_>,
        work: impl Future<Output = Result<(), Trouble>>,
    ) -> Ended {
        tokio::select! {
            biased;
            interrupt = self.interrupted(step, deadline, signs) => interrupt.ended(String::new()),
            result = work => match result {
                Ok(()) => Ended::Done,
                Err(trouble) => Ended::Failed(trouble),
            },
        }
    }
}

/// What a program that could not be started has to say; as a shell would count it.
pub(super) fn not_started(error: &SpawnError) -> Trouble {
    const NOT_STARTED: i32 = 127;
    Trouble { message: error.to_string(), exit: Some(Exit::Code(NOT_STARTED)), ..Trouble::default() }
}

impl Signs<'_> {
    /// Of work that says nothing.
    pub(super) fn none(now: Moment) -> Signs<'static> {
        let (_, moved) = watch::channel(now);
        Signs { moved, message: Box::new(|| None) }
    }
}

/// Progress as a sync tells it.
struct SyncProgress {
    moved: watch::Sender<Moment>,
    message: Mutex<Option<String>>,
    clock: Arc<dyn Clock>,
    filter: Arc<dyn Filter>,
}

impl SyncProgress {
    fn new(ports: &Ports) -> Self {
        let moved = watch::Sender::new(ports.clock.now());
        let (clock, filter) = (Arc::clone(&ports.clock), Arc::clone(&ports.filter));
        SyncProgress { moved, message: Mutex::new(None), clock, filter }
    }

    fn message(&self) -> Option<String> {
        self.message.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Progress for SyncProgress {
    fn progress(&self, message: &str) {
        let mut tail = tail::Tail::default();
        tail.push(tail::Stream::Stdout, &self.filter.once(message.as_bytes()));
        *self.message.lock().unwrap_or_else(PoisonError::into_inner) = tail.message();
        self.moved.send_replace(self.clock.now());
    }
}
