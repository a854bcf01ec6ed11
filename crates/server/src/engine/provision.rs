//! What the engine needs beside the runtime for sandboxes that are made from repositories: an image, a channel to the agent, and
//! somebody who says what the agent told.
//!
//! Owns the port and the engine's side of it. Does not own the channel or the builds: those are behind the port.

use std::sync::Arc;

use async_trait::async_trait;
use sandglass_sandbox::{
    ImageId, SandboxId,
    lifecycle::{
        boot::{AgentFacts, Failure, Link, Reason},
        intent::{Create, Intent, Operation, Progress, RemoveReason, StoredError},
    },
    pool::Pool,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Delivery, Observation, RuntimeError},
        store::{Advance, AgentRecord, EventRecord, StoreError},
    },
    source::{CacheResult, FoundImage, ImageMatch, ImageNews, RejectedImage},
};
use tokio::sync::{Notify, mpsc};
use tracing::warn;

use super::{Engine, loops, stages::Stage, waits};
use crate::workspace::Confidential;

/// See the module documentation. Every method is idempotent, and knows nothing of sandboxes that are not made from repositories.
#[async_trait]
pub trait Provisioner: Send + Sync + 'static {
    /// What is known of the agents after a restart.
    fn known(&self) -> Vec<(SandboxId, AgentFacts)>;

    /// Keeps the secrets of a create that is about to be accepted.
    async fn accept(&self, id: SandboxId, secrets: &Confidential) -> Result<(), RuntimeError>;

    /// Finds the image, or waits for the build of one. Dropped, it waits no longer; what was held for the sandbox until then is let go by
    /// [`Provisioner::forget`]. `told` hears how far it is.
    async fn find_image(
        &self,
        id: SandboxId,
        create: &Create,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure>;

    /// Makes the channel and the files of a box that is about to be made. No deadline of its agent runs until it is
    /// [made](Provisioner::made).
    async fn deliver(&self, id: SandboxId, create: &Create) -> Result<Vec<Delivery>, RuntimeError>;

    /// The runtime made the box of the image that was found for it, or could not. Whether the image is to blame and is let go of, so that
    /// looking again may find another one.
    async fn made(&self, id: SandboxId, create: &Create, made: Result<(), &RuntimeError>) -> bool;

    /// No image is looked for any more, because the sandbox has one or failed: what only builds need is forgotten.
    fn settled(&self, id: SandboxId);

    /// A box froze or runs again.
    fn condition(&self, id: SandboxId, condition: &Condition);

    /// The box is about to be removed: its agent gets no credentials any more, and no other one may attach.
    fn narrow(&self, id: SandboxId);

    /// The box is about to be removed: its agent hears of it, and gets the time to end what it runs. Bounded.
    async fn drain(&self, id: SandboxId, reason: RemoveReason);

    /// Finds the image of a box that is started ahead for a pool of a repository, or has it built; it is held under the box's id until
    /// [`Provisioner::forget`]. Dropped, it waits no longer.
    async fn find_ahead(&self, id: SandboxId, pool: &Pool) -> Result<FoundImage, Failure>;

    /// Makes the files of such a box, which say nothing until [`Provisioner::deliver`] writes into them.
    ///
    /// # Errors
    /// When they cannot be made.
    fn deliver_ahead(&self, id: SandboxId) -> Result<Vec<Delivery>, RuntimeError>;

    /// Such a box exists, and this is held for it: told of everyone that is seen, also after a restart.
    fn adopt_ahead(&self, id: SandboxId, found: &FoundImage);

    /// Such a box is gone, and its id goes on: lets go of what was held for the box and not for the sandbox.
    ///
    /// # Errors
    /// What could not be let go of; to be asked again.
    async fn leave_ahead(&self, id: SandboxId) -> Result<(), RuntimeError>;

    /// The newest image that can be used of the repository that this one is of. `None`: it is not known.
    async fn newest(&self, image: ImageId) -> Option<ImageId>;

    /// Nothing is left of the sandbox: neither may be of its channel, secrets and image.
    ///
    /// # Errors
    /// What could not be taken away; to be asked again.
    async fn forget(&self, id: SandboxId) -> Result<(), RuntimeError>;
}

impl Engine {
    /// Registers who makes sandboxes from repositories possible. Before [`Engine::recover`]; the first call counts.
    pub fn provision_with(&self, provisioner: Arc<dyn Provisioner>) {
        let _ = self.provisioner.set(provisioner);
    }

    pub(super) fn provisioner(&self) -> Option<&Arc<dyn Provisioner>> {
        self.provisioner.get()
    }

    /// The agent of a sandbox told something: what is kept of it, what that makes of it, and the lines of history that go with it.
    ///
    /// # Errors
    /// When the store cannot be written; nothing is changed then.
    pub async fn agent_told(
        self: &Arc<Self>,
        record: &AgentRecord,
        facts: AgentFacts,
        events: &[EventRecord],
    ) -> Result<(), StoreError> {
        let id = record.sandbox_id;
        let failure = facts.failure.clone();
        if facts.link == Link::Attached {
            self.attached(id);
        }
        {
            let _change = self.changing(id);
            self.store.save_agent(record, events).await?;
            self.index.set_agent(id, facts);
        }
        if let Some(failure) = failure {
            self.give_up(id, failure).await?;
        }
        self.poke(id);
        Ok(())
    }

    /// Looks at a box now, and takes in what is seen.
    ///
    /// # Errors
    /// When the runtime cannot be asked.
    pub async fn look_at(self: &Arc<Self>, id: SandboxId) -> Result<Option<Observation>, RuntimeError> {
        let seen = self.runtime.inspect(id).await?;
        match &seen {
            Some(observed) => drop(loops::observe::observed(self, observed.clone()).await),
            None => drop(loops::observe::vanished(self, id, "found missing").await),
        }
        self.poke(id);
        Ok(seen)
    }

    /// The sandbox has failed for good. What is left of its box stays a while, so that somebody can look.
    ///
    /// # Errors
    /// When the store cannot be written.
    pub async fn give_up(self: &Arc<Self>, id: SandboxId, failure: Failure) -> Result<(), StoreError> {
        loop {
            let Some(entry) = self.index.get(id) else { return Ok(()) };
            let now = self.clock.now();
            let (mut create, from, accepted_at) = match (entry.intent.as_deref(), entry.observed.as_deref()) {
                (Some(Intent { operation: Operation::Remove { .. }, .. }), _) => return Ok(()),
                (Some(Intent { operation: Operation::Create(create), accepted_at, .. }), _) => {
                    if matches!(create.progress, Progress::Failed { .. }) {
                        return Ok(());
                    }
                    (create.as_ref().clone(), "Pending", *accepted_at)
                }
                (_, Some(observed)) => (remade(observed), "Running", observed.created_at),
                (_, None) => return Ok(()),
            };
            let was_made = entry.observed.is_some();
            if from == "Pending" {
                self.kind_failed(id, &create.spec, failure.reason, was_made).await?;
            }
            let event = self.event(GIVEN_UP, &told(&failure, from).to_string());
            let phase = failure.phase.clone().unwrap_or_else(|| failure.reason.word().to_owned());
            create.progress = Progress::Failed {
                error: StoredError {
                    kind: RuntimeErrorKind::Failed,
                    phase: phase.clone(),
                    message: failure.message.clone(),
                },
                at: now,
                failure: Some(Box::new(failure.clone())),
                keep_until: was_made.then(|| self.in_future(self.settings.failed_box_retention)),
            };
            if entry.intent.as_deref().is_some_and(|i| matches!(i.operation, Operation::Create(_))) {
                self.announce(id, &create_of(&entry, &create), accepted_at).await;
            }
            let intent = Intent {
                sandbox_id: id,
                generation: entry.next_generation(),
                operation: Operation::Create(Box::new(create)),
                accepted_at,
                deadline: now,
            };
            if self.advance(entry.generation(), intent, Some(&event)).await? == Advance::Written {
                warn!(sandbox = %id, reason = failure.reason.word(), phase, "the sandbox failed");
                self.secrets().remove(&id);
                if let Some(provisioner) = self.provisioner() {
                    provisioner.settled(id);
                }
                self.keep_looks_if_possible(id).await;
                if from == "Pending" {
                    self.created(Some(&phase));
                }
                self.poke(id);
                return Ok(());
            }
            tokio::time::sleep(super::commit::AFTER_LOST_RACE).await;
        }
    }

    /// No box can be made of the image that was found. While it is the image's fault and there may be another one, that is looked for.
    pub(super) async fn rejected(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Intent,
        create: &Create,
        (reason, error): (Reason, &RuntimeError),
        blamed: bool,
    ) -> Result<(), StoreError> {
        let mut next = create.clone();
        let found = next.spec.source.as_mut().filter(|source| source.rejected.len() < REJECTIONS);
        let image = found.and_then(|source| {
            let image = source.found.take()?.image?;
            source.rejected.push(RejectedImage { image, message: error.to_string() });
            Some(image)
        });
        let Some(image) = image.filter(|_| blamed) else {
            return self.give_up(id, super::driver::of_runtime(reason, error)).await;
        };
        warn!(sandbox = %id, %image, %error, "the image is rejected; another one is looked for");
        next.spec.image.clear();
        next.progress = Progress::Accepted;
        let line = serde_json::json!({ "imageId": image, "message": error.to_string() });
        let next = Intent {
            generation: intent.generation + 1,
            operation: Operation::Create(Box::new(next)),
            ..intent.clone()
        };
        let event = self.event("image.rejected", &line.to_string());
        self.advance(Some(intent.generation), next, Some(&event)).await.map(drop)
    }

    /// Finds the image of a create, or has it built, and writes it into the intent.
    pub(super) async fn resolve(
        self: &Arc<Self>,
        id: SandboxId,
        intent: &Intent,
        create: &Create,
        poke: &Notify,
    ) -> Result<(), StoreError> {
        self.announce(id, create, intent.accepted_at).await;
        let Some(provisioner) = self.provisioner().cloned() else {
            let message = "this server makes no sandboxes from repositories any more";
            return self.give_up(id, Failure::new(Reason::RuntimeError, message)).await;
        };
        self.index.set_progress(id, intent.generation, Progress::Resolving);
        self.enter(id, Stage::Resolve);
        let (lines, mut told_lines): waits::Lines = mpsc::unbounded_channel();
        let told = |news: ImageNews| {
            let line = match &news {
                ImageNews::Stands(progress) => self.waits_for(id, progress),
                ImageNews::Step(step) => self.steps_on(id, step),
            };
            if let Some(line) = line {
                // It is read for as long as this is told.
                let _ = lines.send(line);
            }
            if let ImageNews::Stands(progress) = news {
                if matches!(progress, Progress::Queued { .. } | Progress::Building { .. }) {
                    self.enter(id, Stage::Build);
                }
                let _change = self.changing(id);
                self.index.set_progress(id, intent.generation, progress);
            }
        };
        let found = tokio::select! {
            found = provisioner.find_image(id, create, &told) => found,
            () = self.write_lines(id, &mut told_lines) => return Ok(()),
            () = tokio::time::sleep(self.clock.now().until(intent.deadline)) => return Ok(()),
            // A delete makes it pointless; anything else that pokes starts it over, which joins what is under way.
            () = self.superseded(id, intent.generation, poke) => return Ok(()),
        };
        let waited = self.waited_for(id, &mut told_lines, &found).await?;
        let found = match found {
            Ok(found) => found,
            Err(failure) => return self.give_up(id, failure).await,
        };
        let hit = waited.is_none() && found.image.is_some();
        let mut next = create.clone();
        next.spec.image.clone_from(&found.reference);
        next.progress = Progress::Preparing;
        let line = serde_json::json!({
            "hit": hit, "match": found.fit.map(ImageMatch::word), "imageId": found.image, "imageBuildId": found.build, "reference": found.reference, "commits": found.commits,
            "cache": found.cache.map(CacheResult::word),
        });
        if let Some(source) = &mut next.spec.source {
            let recipe =
                found.env.iter().filter(|(name, _)| !create.spec.env.iter().any(|(n, _)| n == *name));
            let mut env: Vec<_> = recipe.map(|(name, value)| (name.clone(), value.clone())).collect();
            env.append(&mut next.spec.env);
            next.spec.env = env;
            source.found = Some(found);
        }
        let next = Intent {
            generation: intent.generation + 1,
            operation: Operation::Create(Box::new(next)),
            ..intent.clone()
        };
        let event = self.event("image.resolved", &line.to_string());
        self.advance(Some(intent.generation), next, Some(&event)).await.map(drop)
    }

    /// Takes away what is left of a sandbox beside its box, in the background, when its box went without a removal of ours.
    pub(super) fn forget_agent_of(self: &Arc<Self>, id: SandboxId) {
        let Some(provisioner) = self.provisioner().cloned() else { return };
        if self.index.get(id).is_some() {
            return;
        }
        self.tasks.spawn(async move {
            if let Err(error) = provisioner.forget(id).await {
                warn!(sandbox = %id, %error, "the channel of a sandbox that is gone stays until the next start");
            }
        });
    }
}

/// Images of one create that may turn out to be unusable before it fails: each is tried twice.
const REJECTIONS: usize = 4;

/// The kind of the line that says why a sandbox made from a repository failed; its message is JSON.
pub const GIVEN_UP: &str = "given_up";
/// The kind of the line that says that such a sandbox is ready.
pub const READY: &str = "ready";

/// What that line says.
pub(super) fn told(failure: &Failure, from: &str) -> serde_json::Value {
    let mut told = serde_json::to_value(failure).unwrap_or_default();
    told["from"] = from.into();
    told["to"] = "Failed".into();
    told
}

/// The create as it was before it failed, for its first line.
fn create_of(entry: &super::index::Entry, failed: &Create) -> Create {
    match entry.intent.as_deref().map(|intent| &intent.operation) {
        Some(Operation::Create(create)) => create.as_ref().clone(),
        _ => failed.clone(),
    }
}

/// What would make a box that exists.
fn remade(observed: &Observation) -> Create {
    Create {
        spec: observed.spec.clone(),
        facts: observed.facts.clone(),
        agent_token: observed.agent_token.clone(),
        route_token: observed.route_token.clone(),
        had_credentials: false,
        progress: Progress::Accepted,
        origin: None,
    }
}
