//! The engine port: what makes images.

use std::{sync::Arc, time::Duration};

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;
use tokio_util::sync::CancellationToken;

use super::log::LogSink;
use crate::{
    build::{Plan, StepName},
    key::ArtifactName,
    submission::Confidential,
};

/// A step of the user's that ended with an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UserFailure {
    pub step: StepName,
    pub exit_code: Option<i32>,
    /// What was run and how it ended, without its output.
    pub message: String,
}

/// Why an engine did not do what it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    /// Nothing was done; the same call may succeed later.
    #[error("{message}")]
    Transient { retry_after: Option<Duration>, message: String },
    #[error("the {} step failed: {}", .0.step.word(), .0.message)]
    User(UserFailure),
    /// The call can never succeed as asked.
    #[error("{0}")]
    Rejected(String),
    #[error("not found: {0}")]
    NotFound(String),
    /// Another object is in the way, or others use it.
    #[error("conflict: {0}")]
    Conflict(String),
    /// The answer was lost: it may have been done.
    #[error("the outcome is not known: {0}")]
    Ambiguous(String),
    #[error("cancelled")]
    Cancelled,
}

impl EngineError {
    pub fn transient(message: impl Into<String>) -> Self {
        Self::Transient { retry_after: None, message: message.into() }
    }
}

/// What an engine keeps under a name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Artifact {
    pub name: ArtifactName,
    /// The build and attempt whose label it bears; `None` when it has no label of ours.
    pub made_by: Option<(ImageBuildId, u32)>,
    /// What the runtime takes as the image of a new sandbox.
    pub reference: String,
    pub digest: Option<String>,
    pub size_bytes: u64,
}

/// One attempt of a build, as the engine sees it.
#[derive(Clone)]
pub struct Job {
    pub build: ImageBuildId,
    /// With the build's id, the name of the build sandbox.
    pub attempt: u32,
    pub namespace: Option<String>,
    pub plan: Plan,
    pub confidential: Confidential,
    /// The image of an older commit to start from, as the runtime takes it.
    pub parent: Option<String>,
    /// Cancelled when the build has to end; the call is dropped when it does not return within the grace.
    pub cancelled: CancellationToken,
    pub log: Arc<dyn LogSink>,
}

/// Makes, finds and removes artifacts. Every method is idempotent by name.
#[async_trait]
pub trait Engine: Send + Sync + 'static {
    /// The runtime whose sandboxes can be made of its artifacts; stable, as rows name it.
    fn name(&self) -> &str;

    /// Runs one step in the attempt's build sandbox, which the first one makes.
    async fn run(&self, job: &Job, step: StepName) -> Result<(), EngineError>;

    /// Keeps the build sandbox's files under the name, labelled with the build and attempt. [`EngineError::Transient`] only if nothing was done.
    async fn capture(&self, job: &Job, name: &ArtifactName) -> Result<Artifact, EngineError>;

    /// What there is under the name; `None` only if there surely is nothing.
    async fn lookup(&self, name: &ArtifactName) -> Result<Option<Artifact>, EngineError>;

    /// Removes what there is under the name. Nothing there is success.
    async fn remove(&self, name: &ArtifactName) -> Result<(), EngineError>;

    /// Kills and removes the build sandbox of an attempt. Nothing there is success.
    async fn discard(&self, build: ImageBuildId, attempt: u32) -> Result<(), EngineError>;
}
