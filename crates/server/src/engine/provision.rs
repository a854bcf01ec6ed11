//! What the engine needs beside the runtime for sandboxes that are made from repositories: an image, a channel to the agent, and
//! somebody who says what the agent told.
//!
//! Owns the port and the engine's side of it. Does not own the channel or the builds: those are behind the port.

use std::sync::Arc;

use async_trait::async_trait;
use sandglass_sandbox::{
    SandboxId,
    lifecycle::{
        boot::{AgentFacts, Failure, Reason},
        intent::{Create, Intent, Operation, Progress, RemoveReason, StoredError},
    },
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Delivery, Observation, RuntimeError},
        store::{Advance, AgentRecord, EventRecord, StoreError},
    },
    source::FoundImage,
};
use tokio::sync::Notify;
use tracing::warn;

use super::{Engine, loops};
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
        told: &(dyn Fn(Progress) + Send + Sync),
    ) -> Result<FoundImage, Failure>;

    /// Makes the channel and the files of a box that is about to be made. No deadline of its agent runs until it is
    /// [made](Provisioner::made).
    async fn deliver(&self, id: SandboxId, create: &Create) -> Result<Vec<Delivery>, RuntimeError>;

    /// The runtime made the box of the image that was found for it, or could not.
    async fn made(&self, id: SandboxId, create: &Create, made: Result<(), &RuntimeError>);

    /// A box froze or runs again.
    fn condition(&self, id: SandboxId, condition: &Condition);

    /// The box is about to be removed: its agent hears of it, and gets the time to end what it runs. Bounded.
    async fn drain(&self, id: SandboxId, reason: RemoveReason);

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
                if from == "Pending" {
                    self.created(Some(&phase));
                }
                self.poke(id);
                return Ok(());
            }
            tokio::time::sleep(super::commit::AFTER_LOST_RACE).await;
        }
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
        let told = |progress: Progress| {
            let _change = self.changing(id);
            self.index.set_progress(id, intent.generation, progress);
        };
        let found = tokio::select! {
            found = provisioner.find_image(id, create, &told) => found,
            () = tokio::time::sleep(self.clock.now().until(intent.deadline)) => return Ok(()),
            // A delete makes it pointless; anything else that pokes starts it over, which joins what is under way.
            () = self.superseded(id, intent.generation, poke) => return Ok(()),
        };
        let found = match found {
            Ok(found) => found,
            Err(failure) => return self.give_up(id, failure).await,
        };
        let mut next = create.clone();
        next.spec.image.clone_from(&found.reference);
        next.progress = Progress::Preparing;
        let line = serde_json::json!({
            "imageId": found.image, "imageBuildId": found.build, "reference": found.reference, "commits": found.commits,
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

/// The kind of the line that says why a sandbox made from a repository failed; its message is JSON.
pub const GIVEN_UP: &str = "given_up";
/// The kind of the line that says that such a sandbox is ready.
pub const READY: &str = "ready";

fn told(failure: &Failure, from: &str) -> serde_json::Value {
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
    }
}
