//! The end of an attempt: capture under a name known before, acceptance in one transaction, or what follows from the failure.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::ImageBuildId;
use tracing::{error, warn};

use super::{Driver, change::Draft, guard::Break};
use crate::{
    build::{BuildState, Cause, ImageBuild, StepName},
    decide::{
        attempt::{self, Stopped},
        ending::{self, Outcome},
    },
    key::ArtifactName,
    ports::{Artifact, EngineError, Job},
    submission::Confidential,
};

/// Looks for an artifact whose capture was not answered; the pauses between them double from one second.
const LOOKS: u32 = 6;
/// Names that may turn out to be taken by others before the build gives up.
const NAMES: usize = 4;

/// How one name's capture ended without an artifact.
enum NoArtifact {
    /// Something that is not ours has the name.
    NameTaken,
    Break(Break),
}

impl From<Break> for NoArtifact {
    fn from(why: Break) -> Self {
        Self::Break(why)
    }
}

impl Driver {
    pub(super) async fn capture(&self, row: ImageBuild, job: &Job) -> Result<Artifact, Break> {
        let (id, fence) = (row.id, row.last_fence);
        for _ in 0..NAMES {
            let name = self.next_name(&row).await?;
            let now = self.now();
            let named = self
                .own_change(id, |row| {
                    if row.artifact.as_ref() == Some(&name) && row.held_by(fence) {
                        return Ok(None);
                    }
                    attempt::finalizing(row, fence, &name, self.rules(), now).map(Some)
                })
                .await;
            let row = named.ok_or(Break::NotMine)??;
            match self.capture_as(&row, job, &name).await {
                Ok(artifact) => return Ok(artifact),
                Err(NoArtifact::NameTaken) => warn!(build = %id, %name, "the name is taken; using another"),
                Err(NoArtifact::Break(why)) => return Err(why),
            }
        }
        let message = "every name for its artifact was taken by something that no build made";
        Err(Break::Outcome(Outcome::Failed { step: None, error: EngineError::Rejected(message.to_owned()) }))
    }

    async fn next_name(&self, row: &ImageBuild) -> Result<ArtifactName, Break> {
        let key = &row.slot.key;
        loop {
            match self.ports.store.reserve_ordinal(&row.slot.runtime, key).await {
                Ok(ordinal) => return Ok(ArtifactName::new(key, ordinal)),
                Err(error) => self.store_failed(row.id, &error).await.ok_or(Break::NotMine)?,
            }
        }
    }

    /// Tries again only what surely was not done. A capture whose answer was lost is looked for, never repeated.
    async fn capture_as(
        &self,
        row: &ImageBuild,
        job: &Job,
        name: &ArtifactName,
    ) -> Result<Artifact, NoArtifact> {
        let mut tried = row.clone();
        loop {
            let error = match self.guarded(row, job, self.ports.engine.capture(job, name)).await {
                Ok(artifact) => return Ok(artifact),
                Err(Break::Engine(error)) => error,
                Err(why) => return Err(why.into()),
            };
            match error {
                EngineError::Transient { .. } => {
                    let Some(wait) = ending::retry_after(&tried, &error, self.rules()) else {
                        return Err(Break::Outcome(Outcome::Failed { step: None, error }).into());
                    };
                    tried.transient_failures += 1;
                    self.tell_retry(row, job, StepName::Export, &error, wait).await;
                    self.pause(row, job, wait).await?;
                }
                EngineError::Conflict(_) => {
                    return match self.look_for(row, job, name).await {
                        Ok(artifact) => Ok(artifact),
                        Err(Break::Outcome(Outcome::CaptureLost(_) | Outcome::CaptureAbsent(_))) => {
                            Err(NoArtifact::NameTaken)
                        }
                        Err(why) => Err(why.into()),
                    };
                }
                EngineError::Ambiguous(_) | EngineError::Cancelled => {
                    return Ok(self.look_for(row, job, name).await?);
                }
                EngineError::User(_) | EngineError::Rejected(_) | EngineError::NotFound(_) => {
                    return Err(Break::Outcome(Outcome::Failed { step: None, error }).into());
                }
            }
        }
    }

    /// The artifact, if it is this attempt's.
    async fn look_for(&self, row: &ImageBuild, job: &Job, name: &ArtifactName) -> Result<Artifact, Break> {
        let ours = Some((row.id, row.attempt));
        let mut doubt = None;
        for look in 0..LOOKS {
            if look > 0 {
                self.pause(row, job, Duration::from_secs(1 << (look - 1))).await?;
            }
            match self.guarded(row, job, self.ports.engine.lookup(name)).await {
                Ok(Some(artifact)) if artifact.made_by == ours => return Ok(artifact),
                Ok(Some(_)) => {
                    doubt = Some("something of others is there under its name".to_owned());
                    break;
                }
                Ok(None) => doubt = None,
                Err(Break::Engine(error)) => doubt = Some(format!("it could not be looked for: {error}")),
                Err(why) => return Err(why),
            }
        }
        let lost = |what: &str| format!("whether the image was captured is not known, and {what}");
        Err(Break::Outcome(match doubt {
            Some(doubt) => Outcome::CaptureLost(lost(&doubt)),
            None => Outcome::CaptureAbsent(lost("nothing is there under its name")),
        }))
    }

    /// A build whose owner is gone in the middle of its capture.
    pub(super) async fn find_artifact(self: Arc<Self>, id: ImageBuildId, name: ArtifactName) {
        let (owner, now) = (self.settings.owner.as_str(), self.now());
        let taken = self
            .own_change(id, |row| {
                if row.state != BuildState::Finalizing {
                    return Err(Stopped::Fenced);
                }
                let written = row.lease.as_ref().is_some_and(|lease| lease.owner == owner);
                Ok((!written).then(|| attempt::take_over(row, owner, self.rules(), now)))
            })
            .await;
        let Some(Ok(row)) = taken else { return };
        let job = self.job(&row, Confidential::default(), None).await;
        let found = match attempt::going_on(&row, row.last_fence) {
            Ok(()) => match self.look_for(&row, &job, &name).await {
                // Whoever captured is gone, and so is what it was captured of: another attempt, under another name, doubles nothing.
                Err(Break::Outcome(Outcome::CaptureAbsent(_))) => {
                    self.note(&row, "its server ended before the image was captured; the build begins again")
                        .await;
                    Err(Break::Outcome(Outcome::Interrupted))
                }
                found => found,
            },
            Err(why) => Err(why.into()),
        };
        self.conclude(id, row.last_fence, found).await;
        self.clear(id).await;
    }

    /// Writes how the attempt ended.
    pub(super) async fn conclude(&self, id: ImageBuildId, fence: u64, done: Result<Artifact, Break>) {
        let outcome = match done {
            Ok(artifact) => match self.accept(id, fence, &artifact).await {
                Some(Err(Stopped::Cancelled(why))) => Outcome::Cancelled(why),
                Some(Err(Stopped::Illegal(illegal))) => {
                    error!(build = %id, %illegal, "a finished build cannot be accepted");
                    let error = EngineError::Rejected(illegal.to_string());
                    Outcome::Failed { step: None, error }
                }
                Some(Ok(_) | Err(Stopped::Fenced)) | None => return,
            },
            Err(Break::Outcome(outcome)) => outcome,
            Err(Break::Engine(error)) => Outcome::Failed { step: None, error },
            Err(Break::NotMine) => return,
        };
        self.end_attempt(id, fence, outcome).await;
    }

    async fn accept(
        &self,
        id: ImageBuildId,
        fence: u64,
        artifact: &Artifact,
    ) -> Option<Result<ImageBuild, Stopped>> {
        let row = loop {
            match self.ports.store.build(id).await {
                Ok(row) => break row?,
                Err(error) => self.store_failed(id, &error).await?,
            }
        };
        let lineage = loop {
            match self.ports.store.images_of(&row.lineage()).await {
                Ok(images) => break images,
                Err(error) => self.store_failed(id, &error).await?,
            }
        };
        let now = self.now();
        self.end_row(id, |row| {
            if row.state == BuildState::Succeeded {
                return Ok(None);
            }
            let (row, image) = ending::accepted(row, fence, artifact, &lineage, now)?;
            Ok(Some(Draft { row, image: Some(image), negative: Some(crate::ports::NegativeChange::Forget) }))
        })
        .await
    }

    pub(super) async fn end_attempt(&self, id: ImageBuildId, fence: u64, outcome: Outcome) {
        let tail = self.ports.logs.tail(id).await.unwrap_or_default();
        let negative = match self.ports.store.build(id).await {
            Ok(Some(row)) => self.ports.store.negative(&row.slot).await.unwrap_or(None),
            _ => None,
        };
        let now = self.now();
        let ended = self
            .end_row(id, |row| {
                if !row.held_by(fence) {
                    return Ok(None);
                }
                let step = row.current_step();
                let outcome = match &outcome {
                    Outcome::Failed { step: None, error } => Outcome::Failed { step, error: error.clone() },
                    other => other.clone(),
                };
                let mut ending = ending::after_attempt(row, &outcome, negative.as_ref(), self.rules(), now)?;
                with_tail(&mut ending, &tail);
                Ok(Some(Draft { row: ending.row, image: None, negative: ending.negative }))
            })
            .await;
        if let Some(Err(why)) = ended {
            error!(build = %id, %why, "the end of a build cannot be written");
        }
    }
}

/// Every copy of the cause carries the end of the log.
pub(super) fn with_tail(ending: &mut ending::Ending, tail: &str) {
    let fill = |cause: &mut Cause| tail.clone_into(&mut cause.tail);
    ending.row.cause.as_mut().map(fill);
    if let Some(crate::ports::NegativeChange::Remember(negative)) = &mut ending.negative {
        fill(&mut negative.cause);
    }
}
