//! One attempt of a build: its steps in order, then the capture.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Driver, change::Draft, guard::Break};
use crate::{
    build::{BuildState, ImageBuild, Obligation, StepName, StepState},
    decide::{
        attempt::{self, Stopped},
        ending::{self, Outcome},
    },
    ports::{Advance, EngineError, Filter, Job, LogSink},
    submission::Confidential,
    time::after,
};

impl Driver {
    /// A waiting build has its turn.
    pub(super) async fn work(self: Arc<Self>, id: ImageBuildId) {
        let Some(row) = self.begin(id).await else { return };
        let (fence, attempt) = (row.last_fence, row.attempt);
        let done = self.attempt(row).await;
        if matches!(done, Err(Break::Engine(_) | Break::Outcome(_))) {
            self.let_go(id, attempt).await;
        }
        self.conclude(id, fence, done).await;
        self.clear(id).await;
    }

    async fn begin(&self, id: ImageBuildId) -> Option<ImageBuild> {
        let (owner, now) = (self.settings.owner.as_str(), self.now());
        let begun = |row: &ImageBuild| {
            // Of this process, and no task of it works on the build but this one: written, and the answer was lost.
            let written = row.state == BuildState::Running
                && row.lease.as_ref().is_some_and(|lease| lease.owner == owner);
            if written { Ok(None) } else { attempt::begin(row, owner, self.rules(), now).map(Some) }
        };
        match self.own_change(id, begun).await? {
            Ok(row) => Some(row),
            Err(why) => {
                tracing::debug!(build = %id, %why, "the build is not begun");
                None
            }
        }
    }

    /// Everything up to the artifact.
    async fn attempt(&self, row: ImageBuild) -> Result<crate::ports::Artifact, Break> {
        let confidential = self.confidential(&row).await?;
        let (row, parent) = self.parent(row).await?;
        let job = self.job(&row, confidential, parent).await;
        if row.attempt > 1 {
            let line = format!("--- attempt {} ---\n", row.attempt);
            job.log.write(StepName::Clone, line.as_bytes()).await;
        }
        let mut row = row;
        let steps: Vec<StepName> =
            row.steps.iter().filter(|s| s.state == StepState::Pending).map(|s| s.name).collect();
        for step in steps {
            row = self.step(row, &job, step).await?;
        }
        self.capture(row, &job).await
    }

    async fn step(&self, row: ImageBuild, job: &Job, step: StepName) -> Result<ImageBuild, Break> {
        let (id, fence) = (row.id, row.last_fence);
        let now = self.now();
        let began = self.own_change(id, |row| attempt::step_began(row, fence, step, now).map(Some)).await;
        let row = began.ok_or(Break::NotMine)??;
        let filtered = Arc::new(Filtered::new(job.log.clone(), self.ports.filters.filter(&job.confidential)));
        let mut told = job.clone();
        told.log = filtered.clone();
        let ran = self.guarded(&row, job, self.ports.engine.run(&told, step)).await;
        filtered.finish(step).await;
        if let Err(Break::Engine(error)) = &ran
            && let Some(wait) = ending::retry_after(&row, error, self.rules())
            && after(self.now(), wait) < row.deadline_at
        {
            self.tell_retry(&row, job, step, error, wait).await;
        }
        ran?;
        let now = self.now();
        let ended = self.own_change(id, |row| attempt::step_done(row, fence, step, now).map(Some)).await;
        Ok(ended.ok_or(Break::NotMine)??)
    }

    async fn confidential(&self, row: &ImageBuild) -> Result<Confidential, Break> {
        if !row.plan.confidential {
            return Ok(Confidential::default());
        }
        loop {
            match self.ports.vault.get(row.id).await {
                Ok(Some(confidential)) => return Ok(confidential),
                Ok(None) => return Err(Break::Outcome(Outcome::SecretsLost)),
                Err(error) => self.store_failed(row.id, &error).await.ok_or(Break::NotMine)?,
            }
        }
    }

    /// Holds the newest image of the lineage to start from, if there is one that can be held. What is held is written before.
    async fn parent(&self, row: ImageBuild) -> Result<(ImageBuild, Option<String>), Break> {
        let (id, fence) = (row.id, row.last_fence);
        let lineage = loop {
            match self.ports.store.images_of(&row.lineage()).await {
                Ok(images) => break images,
                Err(error) => self.store_failed(id, &error).await.ok_or(Break::NotMine)?,
            }
        };
        let Some(parent) = attempt::parent(&row, &lineage, self.rules()) else { return Ok((row, None)) };
        let owed = Obligation::Parent { image: parent.id };
        let holding = self
            .own_change(id, |row| {
                if row.obligations.contains(&owed) && row.parent_image == Some(parent.id) {
                    return Ok(None);
                }
                attempt::with_parent(row, fence, parent.id).map(Some)
            })
            .await;
        let row = holding.ok_or(Break::NotMine)??;
        loop {
            match self.ports.store.acquire(parent.id, &holder(id), self.now()).await {
                Ok(Advance::Written) => return Ok((row, Some(parent.reference.clone()))),
                Ok(Advance::Lost) => return Ok((row, None)),
                Err(error) => self.store_failed(id, &error).await.ok_or(Break::NotMine)?,
            }
        }
    }

    /// What the engine is told of the attempt.
    pub(super) async fn job(
        &self,
        row: &ImageBuild,
        confidential: Confidential,
        parent: Option<String>,
    ) -> Job {
        let log: Arc<dyn LogSink> = match self.ports.logs.open(row.id).await {
            Ok(log) => log,
            Err(error) => {
                warn!(build = %row.id, %error, "the build goes on without a log");
                Arc::new(NoLog)
            }
        };
        Job {
            build: row.id,
            attempt: row.attempt,
            namespace: row.slot.namespace.clone(),
            plan: row.plan.clone(),
            confidential,
            parent,
            cancelled: CancellationToken::new(),
            log,
        }
    }

    /// Says in both logs why something is tried again; the last failure is told by the build's cause.
    pub(super) async fn tell_retry(
        &self,
        row: &ImageBuild,
        job: &Job,
        step: StepName,
        error: &EngineError,
        wait: Duration,
    ) {
        let mut filter = self.ports.filters.filter(&job.confidential);
        let mut line = filter.pass(format!("attempt {} failed: {error}", row.attempt).as_bytes());
        line.extend(filter.finish());
        let reason = String::from_utf8_lossy(&line).into_owned();
        warn!(build = %row.id, step = step.word(), reason, "tried again");
        let line = format!("{reason}; trying again in {} s\n", wait.as_secs());
        job.log.write(step, line.as_bytes()).await;
    }

    /// A line in the log of a build that nobody works on, beside its step.
    pub(super) async fn note(&self, row: &ImageBuild, what: &str) {
        info!(build = %row.id, attempt = row.attempt, "{what}");
        if let Ok(log) = self.ports.logs.open(row.id).await {
            let step = row.current_step().unwrap_or(StepName::Export);
            log.write(step, format!("attempt {}: {what}\n", row.attempt).as_bytes()).await;
        }
    }

    /// The row after the decision about its end; `None` when it is not this owner's to write, or this server stops.
    pub(super) async fn end_row(
        &self,
        id: ImageBuildId,
        decide: impl Fn(&ImageBuild) -> Result<Option<Draft>, Stopped>,
    ) -> Option<Result<ImageBuild, Stopped>> {
        let row = self.change_at_last(id, decide).await?;
        if let Ok(row) = &row
            && row.state.terminal()
        {
            self.close_log(id).await;
        }
        Some(row)
    }
}

/// Under which name a build holds the image it starts from.
pub(super) fn holder(id: ImageBuildId) -> String {
    format!("build:{id}")
}

struct NoLog;

#[async_trait]
impl LogSink for NoLog {
    async fn write(&self, _: StepName, _: &[u8]) {}
}

/// A log behind a filter.
struct Filtered {
    log: Arc<dyn LogSink>,
    /// Asynchronous, so that chunks reach the log in the order in which they passed the filter.
    filter: tokio::sync::Mutex<Box<dyn Filter>>,
}

impl Filtered {
    fn new(log: Arc<dyn LogSink>, filter: Box<dyn Filter>) -> Self {
        Self { log, filter: tokio::sync::Mutex::new(filter) }
    }

    async fn finish(&self, step: StepName) {
        let mut filter = self.filter.lock().await;
        let rest = filter.finish();
        if !rest.is_empty() {
            self.log.write(step, &rest).await;
        }
    }
}

#[async_trait]
impl LogSink for Filtered {
    async fn write(&self, step: StepName, chunk: &[u8]) {
        let mut filter = self.filter.lock().await;
        let clean = filter.pass(chunk);
        if !clean.is_empty() {
            self.log.write(step, &clean).await;
        }
    }
}
