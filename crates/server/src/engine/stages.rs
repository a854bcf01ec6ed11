//! How long each stage of a create takes, until the sandbox is of use. Kept in memory while the create is under way: what a restart cuts off
//! is measured from there on.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::intent::{Create, Intent},
    source::CacheResult,
};

use super::Engine;

/// A stage of a create.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Commits, recipe and key are found out.
    Resolve,
    /// A build is waited for.
    Build,
    /// The image is fetched or unpacked.
    Pull,
    /// The runtime makes the box.
    Create,
    /// The agent's first word is waited for.
    Attach,
    /// The agent brings the workspace up.
    Boot,
}

impl Stage {
    /// The word in metrics.
    pub fn word(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Build => "build",
            Self::Pull => "pull",
            Self::Create => "create",
            Self::Attach => "attach",
            Self::Boot => "boot",
        }
    }
}

/// A create that made a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Timing {
    /// `image`, `snapshot` or `repository`.
    pub source: &'static str,
    /// Of an image that was found for a repository.
    pub cache: Option<CacheResult>,
    /// From the accepted request on.
    pub total: Duration,
    /// In their order; a stage that was gone through twice is there twice.
    pub stages: Vec<(Stage, Duration)>,
}

/// Told of every create that made a sandbox.
pub(super) type TimedHook = Box<dyn Fn(&Timing) + Send + Sync>;

/// Creates that are under way.
#[derive(Default)]
pub(super) struct Stages(Mutex<HashMap<SandboxId, Course>>);

struct Course {
    stage: Stage,
    since: Timestamp,
    over: Vec<(Stage, Duration)>,
}

impl Stages {
    fn lock(&self) -> MutexGuard<'_, HashMap<SandboxId, Course>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn forget(&self, id: SandboxId) {
        self.lock().remove(&id);
    }
}

impl Engine {
    /// Registers who is told how long creates took that made a sandbox. The first call counts.
    pub fn on_timed(&self, hook: impl Fn(&Timing) + Send + Sync + 'static) {
        let _ = self.timed_hook.set(Box::new(hook));
    }

    /// The create is in that stage from now on.
    pub(super) fn enter(&self, id: SandboxId, stage: Stage) {
        let now = self.clock.now();
        let mut courses = self.stages.lock();
        let course = courses.entry(id).or_insert_with(|| Course { stage, since: now, over: Vec::new() });
        if course.stage != stage {
            course.over.push((course.stage, course.since.until(now)));
            (course.stage, course.since) = (stage, now);
        }
    }

    /// The agent has attached, if it was waited for.
    pub(super) fn attached(&self, id: SandboxId) {
        if self.stages.lock().get(&id).is_some_and(|course| course.stage == Stage::Attach) {
            self.enter(id, Stage::Boot);
        }
    }

    /// The create has made a sandbox.
    pub(super) fn came_up(&self, id: SandboxId, intent: &Intent, create: &Create) {
        let course = self.stages.lock().remove(&id);
        let Some(hook) = self.timed_hook.get() else { return };
        let now = self.clock.now();
        let mut stages = Vec::new();
        if let Some(mut course) = course {
            stages.append(&mut course.over);
            stages.push((course.stage, course.since.until(now)));
        }
        let source = create.spec.source.as_deref();
        hook(&Timing {
            source: match (source, create.spec.snapshot) {
                (Some(_), _) => "repository",
                (None, Some(_)) => "snapshot",
                (None, None) => "image",
            },
            cache: source.and_then(|source| source.found.as_ref()?.cache),
            total: intent.accepted_at.until(now),
            stages,
        });
    }
}
