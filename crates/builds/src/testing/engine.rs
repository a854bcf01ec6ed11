//! An engine without images: it keeps names, and does what the test told it to.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;

use super::{Faults, faults::Injected};
use crate::{
    build::StepName,
    key::ArtifactName,
    ports::{Artifact, Engine, EngineError, Job},
};

/// What exists outside of every server, and how the next calls end.
#[derive(Debug, Default)]
pub struct World {
    pub artifacts: BTreeMap<ArtifactName, Artifact>,
    pub workspaces: BTreeSet<(ImageBuildId, u32)>,
    /// Steps that were run: build, attempt, step, and the image that it started from.
    pub ran: Vec<(ImageBuildId, u32, StepName, Option<String>)>,
    /// Captures that were begun, done or not.
    pub captures: Vec<ArtifactName>,
    /// How the next runs of a step end.
    pub step_errors: BTreeMap<StepName, VecDeque<EngineError>>,
    /// How the next captures end, without an artifact.
    pub capture_errors: VecDeque<EngineError>,
    /// Removals that fail before one succeeds, or succeed and remove nothing.
    pub failing_removals: VecDeque<Option<EngineError>>,
    /// How long each step takes.
    pub step_takes: Duration,
    pub capture_takes: Duration,
    /// Steps do not let go when they are cancelled.
    pub deaf: bool,
    /// Calls of [`Engine::discard`].
    pub discarded: Vec<(ImageBuildId, u32)>,
}

/// One server's way to the world.
#[derive(Debug)]
pub struct FakeEngine {
    world: Arc<Mutex<World>>,
    faults: Arc<Faults>,
}

impl FakeEngine {
    pub fn new(world: Arc<Mutex<World>>, faults: Arc<Faults>) -> Self {
        Self { world, faults }
    }

    fn world(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn before(&self, call: &str) -> Result<(), EngineError> {
        self.faults.before(call).await.map_err(|Injected| EngineError::transient("503 from the engine"))
    }

    async fn after(&self, call: &str) -> Result<(), EngineError> {
        let lost = |Injected| EngineError::Ambiguous("the answer was lost".to_owned());
        self.faults.after(call).await.map_err(lost)
    }

    async fn busy(&self, job: &Job, takes: Duration) -> Result<(), EngineError> {
        let deaf = self.world().deaf;
        tokio::select! {
            () = tokio::time::sleep(takes), if !takes.is_zero() => Ok(()),
            () = job.cancelled.cancelled(), if !deaf => Err(EngineError::Cancelled),
            () = std::future::ready(()), if takes.is_zero() => Ok(()),
        }
    }
}

#[async_trait]
impl Engine for FakeEngine {
    fn name(&self) -> &str {
        "fake"
    }

    async fn run(&self, job: &Job, step: StepName) -> Result<(), EngineError> {
        self.before("run").await?;
        let takes = {
            let mut world = self.world();
            world.workspaces.insert((job.build, job.attempt));
            world.ran.push((job.build, job.attempt, step, job.parent.clone()));
            world.step_takes
        };
        let line = format!("{} runs\n", step.word());
        job.log.write(step, line.as_bytes()).await;
        for secret in job.confidential.secrets.values() {
            job.log.write(step, format!("uses {}\n", secret.expose()).as_bytes()).await;
        }
        self.busy(job, takes).await?;
        let error = self.world().step_errors.get_mut(&step).and_then(VecDeque::pop_front);
        if let Some(error) = error {
            job.log.write(step, format!("{error}\n").as_bytes()).await;
            return Err(error);
        }
        self.after("run").await
    }

    async fn capture(&self, job: &Job, name: &ArtifactName) -> Result<Artifact, EngineError> {
        self.before("capture").await?;
        let takes = {
            let mut world = self.world();
            world.captures.push(name.clone());
            world.capture_takes
        };
        self.busy(job, takes).await?;
        let artifact = {
            let mut world = self.world();
            if let Some(error) = world.capture_errors.pop_front() {
                return Err(error);
            }
            if world.artifacts.contains_key(name) {
                return Err(EngineError::Conflict(name.to_string()));
            }
            let artifact = Artifact {
                name: name.clone(),
                made_by: Some((job.build, job.attempt)),
                reference: format!("{name}:latest"),
                digest: Some(format!("sha256:{name}")),
                size_bytes: 100,
            };
            world.artifacts.insert(name.clone(), artifact.clone());
            artifact
        };
        self.after("capture").await?;
        Ok(artifact)
    }

    async fn lookup(&self, name: &ArtifactName) -> Result<Option<Artifact>, EngineError> {
        self.before("lookup").await?;
        let found = self.world().artifacts.get(name).cloned();
        self.after("lookup").await?;
        Ok(found)
    }

    async fn remove(&self, name: &ArtifactName) -> Result<(), EngineError> {
        self.before("remove").await?;
        {
            let mut world = self.world();
            match world.failing_removals.pop_front() {
                Some(Some(error)) => return Err(error),
                Some(None) => {}
                None => drop(world.artifacts.remove(name)),
            }
        }
        self.after("remove").await
    }

    async fn discard(&self, build: ImageBuildId, attempt: u32) -> Result<(), EngineError> {
        self.before("discard").await?;
        {
            let mut world = self.world();
            world.workspaces.remove(&(build, attempt));
            world.discarded.push((build, attempt));
        }
        self.after("discard").await
    }
}
