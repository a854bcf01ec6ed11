//! The boot as a whole: the order of its steps, and what a failure of each means.
//!
//! Invariant: whatever ends the boot early, it is reported first, and then the services are stopped; nothing of it goes on when
//! [`Boot::run`] has returned anything but [`Outcome::Ready`].

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use super::deadline::Expired;
use super::step::{Ended, Signs, Stepper, Trouble, not_started};
use crate::clock::Moment;
use crate::filter::clean;
use crate::plan::{BootPlan, HookStep, OnFailure, Phase, SOURCE_VARIABLE, Source, StepLimits};
use crate::ports::{Entrypoint, Ports, Repositories};
use crate::report::{Event, Failure, Reason, Step, StepOutcome};
use crate::service::Services;

/// A boot to be run.
pub struct Boot {
    pub plan: BootPlan,
    pub ports: Ports,
    /// The services of the plan are added here, and go on after the boot.
    pub services: Services,
    pub repositories: Arc<dyn Repositories>,
    pub entrypoint: Arc<dyn Entrypoint>,
}

/// How a boot ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The required services answer and the entrypoint runs. With warnings, the box works with something missing.
    Ready {
        warnings: Vec<Failure>,
    },
    Failed(Failure),
    /// It was cancelled in that phase.
    Cancelled {
        phase: Phase,
    },
}

/// Why the boot does not go on.
enum Broken {
    Failed(Box<Failure>),
    Cancelled(Phase),
}

impl Boot {
    /// Runs the plan. Cancelled, it ends within the grace of the plan, with everything it started but the entrypoint, which is the agent's.
    /// Dropping it instead ends nothing.
    pub async fn run(self, cancel: CancellationToken) -> Outcome {
        let started = self.ports.clock.now();
        let limits = self.plan.limits;
        let stepper = Stepper {
            ports: &self.ports,
            services: &self.services,
            cancel: &cancel,
            last: started + limits.deadline(),
            grace: limits.grace(),
        };
        // When it was cancelled, the services have what is left of the grace.
        let cancelled_at = async {
            cancel.cancelled().await;
            self.ports.clock.now()
        };
        let steps = async {
            let mut running = RunningBoot { boot: &self, stepper, warnings: Vec::new() };
            running.phases().await.map(|()| running.warnings)
        };
        tokio::pin!(cancelled_at, steps);
        let mut since: Option<Moment> = None;
        let result = loop {
            tokio::select! {
                biased;
                at = &mut cancelled_at, if since.is_none() => since = Some(at),
                result = &mut steps => break result,
            }
        };
        let report = |event| self.ports.reporter.report(event);
        let spent = |since: Moment| self.ports.clock.now().since(since);
        match result {
            Ok(warnings) => {
                report(Event::BootCompleted { warnings: u32::try_from(warnings.len()).unwrap_or(u32::MAX) });
                Outcome::Ready { warnings }
            }
            Err(Broken::Failed(failure)) => {
                let failure = *failure;
                report(Event::BootFailed(failure.clone()));
                self.services.stop_all(limits.grace()).await;
                Outcome::Failed(failure)
            }
            Err(Broken::Cancelled(phase)) => {
                let left = limits.grace().saturating_sub(since.map_or(Duration::ZERO, spent));
                self.services.stop_all(left).await;
                report(Event::BootCancelled { phase });
                Outcome::Cancelled { phase }
            }
        }
    }
}

struct RunningBoot<'a> {
    boot: &'a Boot,
    stepper: Stepper<'a>,
    warnings: Vec<Failure>,
}

impl RunningBoot<'_> {
    async fn phases(&mut self) -> Result<(), Broken> {
        self.sync().await?;
        self.hooks(Phase::Setup, &self.boot.plan.setup).await?;
        self.services().await?;
        self.hooks(Phase::Start, &self.boot.plan.start).await?;
        self.entrypoint().await
    }

    async fn sync(&mut self) -> Result<(), Broken> {
        let Some(sync) = &self.boot.plan.sync else { return Ok(()) };
        let step = of(Phase::Sync);
        let began = self.begin(&step, sync.limits)?;
        let deadline = self.stepper.deadline(sync.limits);
        let ended = self.stepper.sync(&step, &*self.boot.repositories, &sync.request, deadline).await;
        self.finish(step, began, ended, sync.policy(self.boot.plan.source))
    }

    async fn hooks(&mut self, phase: Phase, hooks: &[HookStep]) -> Result<(), Broken> {
        let source = self.boot.plan.source;
        for hook in hooks {
            let step = Step { phase, step: Some(hook.label.clone()) };
            let limits = hook.limits(phase);
            let began = self.begin(&step, limits)?;
            if phase == Phase::Setup && source != Source::Fresh {
                // The image or the snapshot has what it made.
                self.report_finished(&step, began, StepOutcome::Skipped);
                continue;
            }
            let mut program = hook.command.program();
            program.env.entry(SOURCE_VARIABLE.into()).or_insert_with(|| source.name().into());
            let deadline = self.stepper.deadline(limits);
            let ended = self.stepper.program(&step, &program, deadline).await;
            self.finish(step, began, ended, hook.on_failure)?;
        }
        Ok(())
    }

    async fn services(&mut self) -> Result<(), Broken> {
        let plan = &self.boot.plan;
        // The agent may have services of its own.
        if plan.services.is_empty() && self.boot.services.snapshots().is_empty() {
            return Ok(());
        }
        let step = of(Phase::Services);
        let limits = within(plan.limits.services_seconds);
        let began = self.begin(&step, limits)?;
        let added = plan.services.iter().try_for_each(|service| self.boot.services.add(service.clone()));
        let ended = match added {
            Ok(()) => self.stepper.services(&step, self.stepper.deadline(limits)).await,
            Err(error) => Ended::Failed(Trouble { message: error.to_string(), ..Trouble::default() }),
        };
        self.finish(step, began, ended, OnFailure::Fail)
    }

    async fn entrypoint(&mut self) -> Result<(), Broken> {
        let plan = &self.boot.plan;
        let Some(entrypoint) = &plan.entrypoint else { return Ok(()) };
        let step = of(Phase::Entrypoint);
        let limits = within(plan.limits.entrypoint_seconds);
        let began = self.begin(&step, limits)?;
        let program = entrypoint.program();
        let starting =
            async { self.boot.entrypoint.start(&program).await.map_err(|error| not_started(&error)) };
        let deadline = self.stepper.deadline(limits);
        let signs = Signs::none(self.boot.ports.clock.now());
        let ended = self.stepper.work(&step, deadline, signs, starting).await;
        self.finish(step, began, ended, OnFailure::Fail)
    }

    /// A step begins, unless the boot is over.
    fn begin(&self, step: &Step, limits: StepLimits) -> Result<Moment, Broken> {
        if self.stepper.cancel.is_cancelled() {
            return Err(Broken::Cancelled(step.phase));
        }
        self.boot.ports.reporter.report(Event::PhaseStarted { step: step.clone(), limits });
        Ok(self.boot.ports.clock.now())
    }

    /// Reports the end of a step, and decides whether the boot goes on.
    fn finish(&mut self, step: Step, began: Moment, ended: Ended, policy: OnFailure) -> Result<(), Broken> {
        // What ended the boot may also have ended the step, in whatever way that shows.
        if matches!(ended, Ended::Cancelled) || self.stepper.cancel.is_cancelled() {
            self.report_finished(&step, began, StepOutcome::Cancelled);
            return Err(Broken::Cancelled(step.phase));
        }
        let (failure, policy) = match ended {
            Ended::Done | Ended::Cancelled => {
                self.report_finished(&step, began, StepOutcome::Done);
                return Ok(());
            }
            Ended::Failed(trouble) => (self.failed(&step, trouble), policy),
            Ended::TimedOut { expired, output_tail } => {
                let message = format!("{step}: {expired}");
                let policy = if expired == Expired::Boot { OnFailure::Fail } else { policy };
                (Failure::new(Reason::BootTimeout, step.clone(), message, None, output_tail), policy)
            }
            Ended::ServiceFailed(failure) => (failure, OnFailure::Fail),
        };
        match policy {
            OnFailure::Warn => {
                self.report_finished(&step, began, StepOutcome::Warned);
                self.boot.ports.reporter.report(Event::BootWarning(failure.clone()));
                self.warnings.push(failure);
                Ok(())
            }
            OnFailure::Fail => {
                self.report_finished(&step, began, StepOutcome::Failed);
                Err(Broken::Failed(Box::new(failure)))
            }
        }
    }

    fn failed(&self, step: &Step, trouble: Trouble) -> Failure {
        let Trouble { cause, message, exit, output_tail } = trouble;
        let message = clean(&*self.boot.ports.filter, &format!("{step}: {message}"));
        Failure { cause, ..Failure::new(Reason::BootFailed, step.clone(), message, exit, output_tail) }
    }

    fn report_finished(&self, step: &Step, began: Moment, outcome: StepOutcome) {
        let took = self.boot.ports.clock.now().since(began);
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let event = Event::PhaseFinished { step: step.clone(), outcome, duration_ms };
        self.boot.ports.reporter.report(event);
    }
}

fn of(phase: Phase) -> Step {
    Step { phase, step: None }
}

fn within(seconds: u64) -> StepLimits {
    StepLimits { timeout_seconds: seconds, cap_seconds: None }
}
