//! One task per sandbox with an open intent: asks the pure step function what to do, does it, records what came of it.
//!
//! A driver sleeps only on a deadline or a poke, never polls, and ends when nothing is left to do. Running twice is impossible by the map of
//! drivers; being killed at any point is harmless because every effect is idempotent and the intent is still there.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::{
        boot::{Failure, Reason},
        intent::{Create, Intent, Operation, Progress, RemoveReason},
        step::{self, Outcome, Step},
    },
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Delivery, Observation, PrepareProgress, RuntimeError, StartPlan},
        store::{Advance, EventRecord, StoreError},
    },
    spec::MutableFacts,
};
use tokio::sync::Notify;
use tracing::{info, warn};

use super::{Engine, history::OF_EGRESS, index::Entry, loops, stages::Stage};
use crate::telemetry::{belonging, traces};

/// Progress lines of one phase are at least this far apart.
const PROGRESS_PAUSE: Duration = Duration::from_secs(1);
/// How long to leave a runtime alone that could not be reached.
const RUNTIME_RETRY: Duration = Duration::from_secs(1);
/// How long to leave a store alone that cannot be written.
const STORE_RETRY: Duration = Duration::from_secs(1);

impl Engine {
    /// Makes sure that somebody looks at this sandbox now.
    pub(super) fn poke(self: &Arc<Self>, id: SandboxId) {
        let mut drivers = self.drivers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(poke) = drivers.get(&id) {
            poke.notify_one();
        } else if !self.stopping.is_cancelled() {
            let poke = Arc::new(Notify::new());
            drivers.insert(id, poke.clone());
            let engine = self.clone();
            // What the driver logs and traces belongs to the request that began the operation.
            self.tasks.spawn(belonging(async move { engine.drive(id, &poke).await }));
        }
    }

    fn next_step(&self, id: SandboxId) -> (Option<Entry>, Step) {
        let entry = self.index.get(id);
        let at_hand = self.secrets().contains_key(&id);
        let step = step::next(
            entry.as_ref().and_then(|e| e.intent.as_deref()),
            entry.as_ref().and_then(|e| e.observed.as_deref()),
            entry.as_ref().and_then(|e| e.agent.as_deref()),
            at_hand,
            self.clock.now(),
        );
        (entry, step)
    }

    async fn drive(self: Arc<Self>, id: SandboxId, poke: &Notify) {
        loop {
            if self.stopping.is_cancelled() {
                return;
            }
            let (entry, step) = self.next_step(id);
            match (entry.and_then(|e| e.intent.clone()), step) {
                (_, Step::Nothing) | (None, _) => {
                    // Under the lock nobody can poke between this look and the removal.
                    let mut drivers = self.drivers.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                    if self.next_step(id).1 == Step::Nothing {
                        drivers.remove(&id);
                        self.secrets().remove(&id);
                        self.journal.forget(id);
                        self.stages.forget(id);
                        return;
                    }
                }
                (Some(_), Step::WaitUntil(at)) => self.sleep_until(at, poke).await,
                (Some(intent), step) => {
                    if let Err(error) = self.perform(id, &intent, step, poke).await {
                        warn!(sandbox = %id, error = %error, "the store cannot be written; trying again");
                        tokio::time::sleep(STORE_RETRY).await;
                    }
                }
            }
        }
    }

    async fn sleep_until(&self, at: Timestamp, poke: &Notify) {
        // Capped so that a clock that jumped is noticed.
        let wait = self.clock.now().until(at).min(Duration::from_secs(5));
        tokio::select! {
            () = tokio::time::sleep(wait) => {}
            () = poke.notified() => {}
            () = self.stopping.cancelled() => {}
        }
    }

    async fn perform(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Arc<Intent>,
        step: Step,
        poke: &Notify,
    ) -> Result<(), StoreError> {
        match (step, &intent.operation) {
            (Step::Resolve, Operation::Create(create)) => self.resolve(id, intent, create, poke).await,
            (Step::GiveUp(failure), Operation::Create(_)) => self.give_up(id, *failure).await,
            (Step::Prepare, Operation::Create(create)) => self.prepare(id, intent, create, poke).await,
            (Step::Start, Operation::Create(_)) => self.start(id, intent.generation, poke).await,
            (Step::Pause, _) => {
                let _working = self.working_on(id);
                let done = self.runtime.pause(id).await;
                let done = self.looked_at(id, Condition::Paused, done).await;
                self.frozen(id, intent, done, "paused").await
            }
            (Step::Resume, _) => {
                let _working = self.working_on(id);
                let done = self.runtime.resume(id).await;
                let done = self.looked_at(id, Condition::Running, done).await;
                self.frozen(id, intent, done, "resumed").await
            }
            (Step::Remove, Operation::Remove { reason, .. }) => {
                let _working = self.working_on(id);
                self.remove(id, intent, *reason).await
            }
            (Step::Close(Outcome::Done), Operation::Create(create)) => {
                self.close_created(id, intent, create).await
            }
            (Step::Close(outcome), operation) => {
                let events = match (outcome, operation) {
                    // Somebody else did it: by hand, or an attempt whose answer was lost.
                    (Outcome::Done, Operation::Pause) => vec![self.event("paused", "")],
                    (Outcome::Done, _) => vec![self.event("resumed", "")],
                    (Outcome::Overtaken, _) => {
                        vec![self.event("overtaken", "the box ended before the operation took effect")]
                    }
                    (Outcome::TimedOut, Operation::Pause) => {
                        vec![self.event("pause_timed_out", "the pause did not take effect in time")]
                    }
                    (Outcome::TimedOut, _) => {
                        vec![self.event("resume_timed_out", "the resume did not take effect in time")]
                    }
                };
                if outcome != Outcome::Done {
                    let error = RuntimeError::new(
                        RuntimeErrorKind::Failed,
                        "freeze",
                        "the operation did not take effect",
                    );
                    self.index.set_failure(id, intent.generation, error);
                }
                self.close(id, intent.generation, &events).await.map(drop)
            }
            (Step::Discard, Operation::Create(_)) => {
                let mut removed = self.runtime.remove(id, Duration::ZERO).await;
                if removed.is_ok()
                    && let Some(provisioner) = self.provisioner()
                {
                    removed = provisioner.forget(id).await;
                }
                match removed {
                    Ok(()) => {
                        self.vanished(id);
                    }
                    Err(error) => self.await_runtime(id, intent.generation, error, poke).await,
                }
                Ok(())
            }
            (Step::FailCreate(why), Operation::Create(_)) => {
                let _ = self.runtime.remove(id, Duration::ZERO).await;
                self.vanished(id);
                let error = RuntimeError::new(RuntimeErrorKind::Failed, "create", why);
                self.fail_create(id, intent.generation, error).await
            }
            (step, operation) => unreachable!("the step table does not pair {step:?} with {operation:?}"),
        }
    }

    async fn prepare(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Intent,
        create: &Create,
        poke: &Notify,
    ) -> Result<(), StoreError> {
        self.index.set_progress(id, intent.generation, Progress::Preparing);
        self.enter(id, Stage::Pull);
        let secrets = self.secrets().get(&id).cloned().unwrap_or_default();
        let (tell, told) = tokio::sync::mpsc::channel(16);
        let work = async {
            // What nobody has written down yet is dropped: progress must not hold up the work.
            let report = |progress: PrepareProgress| drop(tell.try_send(progress));
            let done = self.runtime.prepare(&create.spec, &secrets, &report).await;
            drop(tell);
            done
        };
        let mut span = phase("sandbox.prepare", id);
        let prepared = tokio::select! {
            (done, ()) = futures_util::future::join(
                work,
                self.record_progress(id, create, intent.accepted_at, told),
            ) => done,
            // A delete makes the pull pointless; anything else that pokes starts it over, which is cheap.
            () = self.superseded(id, intent.generation, poke) => return Ok(()),
        };
        end_phase(&mut span, prepared.as_ref().err());
        drop(span);
        match prepared {
            Ok(()) => {
                self.index.set_progress(id, intent.generation, Progress::Starting);
                Ok(())
            }
            Err(error) if error.retryable() => {
                self.await_runtime(id, intent.generation, error, poke).await;
                Ok(())
            }
            Err(error) if create.spec.source.is_some() => {
                let blamed = self.image_served(id, create, Err(&error)).await;
                self.rejected(id, intent, create, (Reason::ImagePullFailed, &error), blamed).await
            }
            Err(error) => self.fail_create(id, intent.generation, error).await,
        }
    }

    /// Writes what `prepare` tells into the history, at most a line a second of each phase, until that is over.
    async fn record_progress(
        &self,
        id: SandboxId,
        create: &Create,
        accepted_at: Timestamp,
        mut told: tokio::sync::mpsc::Receiver<PrepareProgress>,
    ) {
        let mut last: Option<(&'static str, Timestamp)> = None;
        while let Some(progress) = told.recv().await {
            let now = self.clock.now();
            let recent = |(phase, at): (&'static str, Timestamp)| {
                phase == progress.phase && at.until(now) < PROGRESS_PAUSE
            };
            if last.is_some_and(recent) {
                continue;
            }
            last = Some((progress.phase, now));
            self.announce(id, create, accepted_at).await;
            self.note(id, &format!("image_{}", progress.phase), &progress.message).await;
        }
    }

    /// The step is tried again every now and then, until the deadline. What stirs the driver and changes nothing, as an attempt's own steps
    /// do, makes it no sooner.
    async fn await_runtime(&self, id: SandboxId, generation: u64, error: RuntimeError, poke: &Notify) {
        warn!(sandbox = %id, %error, "the sandbox waits for its runtime");
        tokio::select! {
            () = tokio::time::sleep(RUNTIME_RETRY) => {}
            () = self.superseded(id, generation, poke) => {}
        }
    }

    async fn pause_until_poked(&self, poke: &Notify) {
        tokio::select! {
            () = tokio::time::sleep(RUNTIME_RETRY) => {}
            () = poke.notified() => {}
            () = self.stopping.cancelled() => {}
        }
    }

    pub(super) async fn superseded(&self, id: SandboxId, generation: u64, poke: &Notify) {
        loop {
            tokio::select! {
                () = poke.notified() => {}
                () = self.stopping.cancelled() => return,
            }
            if self.index.get(id).and_then(|e| e.generation()) != Some(generation) {
                return;
            }
        }
    }

    async fn start(
        self: &Arc<Self>,
        id: SandboxId,
        generation: u64,
        poke: &Notify,
    ) -> Result<(), StoreError> {
        let Ok(slot) = self.starting.acquire().await else { return Ok(()) };
        // A renewal of a pending sandbox changes the intent's facts; from here on it must wait for the box.
        let facts = self.facts_lock(id).lock().await;
        let Some(intent) = self.index.get(id).and_then(|e| e.intent) else { return Ok(()) };
        let Operation::Create(create) = &intent.operation else { return Ok(()) };
        if intent.generation != generation {
            // A renewal got in first and bumped the generation: carry the progress over and go on with its facts.
            self.index.set_progress(id, intent.generation, Progress::Starting);
        }
        self.enter(id, Stage::Create);
        let delivery = match self.deliver(id, create).await {
            Ok(delivery) => delivery,
            Err(error) => {
                return self.give_up(id, of_runtime(Reason::ContainerCreateFailed, &error)).await;
            }
        };
        let plan = StartPlan {
            spec: create.spec.clone(),
            facts: begun(create, self.clock.now()),
            root_agent: create.spec.source.is_some(),
            delivery,
            created_at: intent.accepted_at,
            agent_token: create.agent_token.clone(),
            route_token: create.route_token.clone(),
        };
        let secrets = self.secrets().get(&id).cloned().unwrap_or_default();
        let working = self.working_on(id);
        let mut span = phase("sandbox.start", id);
        let started = match self.assign(id, (intent.as_ref(), create.as_ref()), &plan).await {
            Ok(Some(assigned)) => Ok(assigned),
            Ok(None) => self.runtime.start(id, &plan, &secrets).await,
            Err(error) => Err(error),
        };
        end_phase(&mut span, started.as_ref().err());
        drop(span);
        let blamed = self.image_served(id, create, started.as_ref().map(drop)).await;
        match started {
            Ok(observed) => {
                if observed.condition == Condition::Starting {
                    self.index.observe(observed);
                    drop((slot, facts, working));
                    self.pause_until_poked(poke).await;
                    return Ok(());
                }
                let _change = self.changing(id);
                self.index.observe(observed);
                self.secrets().remove(&id);
                if create.spec.source.is_some() {
                    self.enter(id, Stage::Attach);
                    // Its agent has the last word; the next step waits for it.
                    return Ok(());
                }
                self.close_created(id, &intent, create).await
            }
            Err(error) if error.retryable() => {
                drop((slot, facts, working));
                self.await_runtime(id, intent.generation, error, poke).await;
                Ok(())
            }
            Err(error) if create.spec.source.is_some() => {
                self.rejected(id, &intent, create, (Reason::ContainerCreateFailed, &error), blamed).await
            }
            Err(error) => self.fail_create(id, intent.generation, error).await,
        }
    }

    /// Tells how the image of a create served; whether another one may serve better.
    async fn image_served(&self, id: SandboxId, create: &Create, made: Result<(), &RuntimeError>) -> bool {
        match self.provisioner() {
            Some(provisioner) if create.spec.source.is_some() => provisioner.made(id, create, made).await,
            _ => false,
        }
    }

    /// What the box finds beside the files of its image.
    async fn deliver(&self, id: SandboxId, create: &Create) -> Result<Vec<Delivery>, RuntimeError> {
        match self.provisioner() {
            Some(provisioner) if create.spec.source.is_some() => provisioner.deliver(id, create).await,
            _ => Ok(Vec::new()),
        }
    }

    /// An answer that is an error says nothing about what was done: look.
    async fn looked_at(
        self: &Arc<Self>,
        id: SandboxId,
        wanted: Condition,
        done: Result<Observation, RuntimeError>,
    ) -> Result<Observation, RuntimeError> {
        let error = match done {
            Err(error) if error.kind != RuntimeErrorKind::NotFound && !error.retryable() => error,
            done => return done,
        };
        match self.runtime.inspect(id).await {
            Ok(Some(now)) if now.condition == wanted => Ok(now),
            Ok(Some(now)) => {
                loops::observe::observed(self, now).await;
                Err(error)
            }
            _ => Err(error),
        }
    }

    async fn frozen(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Intent,
        done: Result<Observation, RuntimeError>,
        kind: &str,
    ) -> Result<(), StoreError> {
        let _change = self.changing(id);
        let mut events = Vec::new();
        match done {
            Ok(observed) => {
                if let Some(provisioner) = self.provisioner() {
                    provisioner.condition(id, &observed.condition);
                }
                let runs = observed.condition == Condition::Running;
                self.index.observe(observed);
                if runs {
                    self.runs_again(id).await;
                }
                events.push(self.event(kind, ""));
            }
            Err(error) => {
                warn!(sandbox = %id, error = %error, "could not be {kind}");
                events.push(self.event(&format!("{kind}_failed"), &error.to_string()));
                let gone = error.kind == RuntimeErrorKind::NotFound;
                if gone {
                    self.keep_looks(id).await?;
                }
                if gone && self.vanished(id) {
                    events.push(self.last_line("not by this server"));
                }
                self.index.set_failure(id, intent.generation, error);
            }
        }
        self.close(id, intent.generation, &events).await.map(drop)
    }

    async fn remove(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Intent,
        why: RemoveReason,
    ) -> Result<(), StoreError> {
        let reason = why.word();
        if let Some(provisioner) = self.provisioner() {
            provisioner.narrow(id);
        }
        if !self.run_pre_stop(id, intent, why).await {
            return Ok(());
        }
        if let Some(provisioner) = self.provisioner() {
            provisioner.drain(id, why).await;
        }
        // Once the box is gone nobody knows any more what it was, and a server that ends meanwhile leaves that to nobody.
        let first = matches!(intent.operation, Operation::Remove { last_error: None, .. });
        if first {
            self.keep_looks(id).await?;
        }
        // What the box knows of its own past goes into the history before the box goes.
        let known = self.runtime.events(id).await.unwrap_or_default().into_iter();
        let mut events: Vec<EventRecord> =
            known.filter(|event| !event.kind.starts_with(OF_EGRESS)).map(record).collect();
        let mut removed = self.runtime.remove(id, self.settings.stop_grace).await;
        if removed.is_ok()
            && let Some(provisioner) = self.provisioner()
        {
            removed = provisioner.forget(id).await;
        }
        match removed {
            Ok(()) => {
                info!(sandbox = %id, reason, "removed");
                let _change = self.changing(id);
                events.push(self.last_line(reason));
                self.vanished(id);
                self.close(id, intent.generation, &events).await.map(drop)
            }
            Err(error) => {
                warn!(sandbox = %id, error = %error, "removal failed");
                let not_before = self.clock.now().checked_add(self.settings.remove_retry);
                let event = self.event("remove_failed", &error.to_string());
                let operation =
                    Operation::Remove { reason: why, not_before, last_error: Some(error.to_string()) };
                let again = Intent { generation: intent.generation + 1, operation, ..intent.clone() };
                if self.advance(Some(intent.generation), again, Some(&event)).await? == Advance::Written {
                    self.index.set_failure(id, intent.generation, error);
                }
                Ok(())
            }
        }
    }

    async fn fail_create(
        &self,
        id: SandboxId,
        generation: u64,
        error: RuntimeError,
    ) -> Result<(), StoreError> {
        warn!(sandbox = %id, phase = error.phase, error = error.message, "create failed");
        self.secrets().remove(&id);
        let Some(intent) = self.index.get(id).and_then(|e| e.intent).filter(|i| i.generation == generation)
        else {
            return Ok(());
        };
        let Operation::Create(create) = &intent.operation else { return Ok(()) };
        let at = self.clock.now();
        let event = self.event("create_failed", &error.to_string());
        let phase = error.phase.clone();
        let mut failed = create.as_ref().clone();
        failed.progress = Progress::Failed { error: error.into(), at, failure: None, keep_until: None };
        let failed = Intent {
            generation: generation + 1,
            operation: Operation::Create(Box::new(failed)),
            ..intent.as_ref().clone()
        };
        self.announce(id, create, intent.accepted_at).await;
        if self.advance(Some(generation), failed, Some(&event)).await? == Advance::Written {
            self.keep_looks_if_possible(id).await;
            self.created(Some(&phase));
        }
        Ok(())
    }
}

/// The facts of a box whose life begins now.
fn begun(create: &Create, now: Timestamp) -> MutableFacts {
    let mut facts = create.facts.clone();
    let ttl = create.spec.source.as_ref().and_then(|source| source.ttl_seconds);
    if let Some(until) = ttl.and_then(|ttl| now.checked_add(Duration::from_secs(ttl))) {
        // Somebody may have renewed it for longer while it waited.
        facts.expires_at = facts.expires_at.map(|at| at.max(until));
    }
    facts
}

/// A runtime's failure as that of a sandbox made from a repository.
pub(super) fn of_runtime(reason: Reason, error: &RuntimeError) -> Failure {
    Failure { phase: Some(error.phase.clone()), ..Failure::new(reason, error.message.clone()) }
}

/// A line of the box's own history, marked as such: the server has lines of the same kinds.
fn record(event: sandglass_sandbox::ports::runtime::BoxEvent) -> EventRecord {
    EventRecord { at: event.at, kind: format!("box.{}", event.kind), message: event.message }
}

/// A phase of a create as a span of the request that began it.
fn phase(name: &'static str, id: SandboxId) -> Option<traces::Span> {
    let mut span = traces::child(name)?;
    span.text("opensandbox.sandbox.id", id.to_string());
    Some(span)
}

fn end_phase(span: &mut Option<traces::Span>, error: Option<&RuntimeError>) {
    if let (Some(span), Some(error)) = (span, error) {
        span.text("opensandbox.phase", error.phase.clone());
        span.fail(error.message.clone());
    }
}
