//! The log port: where the output of builds goes, and what it passes before.

use std::sync::Arc;

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;

use crate::{build::StepName, submission::Confidential};

/// Why a log could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("there is no log of that build")]
    NotFound,
    #[error("too many readers follow the log already")]
    Busy,
    #[error("the log of the build cannot be used: {0}")]
    Io(#[from] std::io::Error),
}

/// Takes the output of one build. A log that cannot be written does not fail its build.
#[async_trait]
pub trait LogSink: Send + Sync + 'static {
    async fn write(&self, step: StepName, chunk: &[u8]);
}

/// The logs of all builds.
#[async_trait]
pub trait Logs: Send + Sync + 'static {
    /// Opens the log for appending, after a crash too.
    async fn open(&self, build: ImageBuildId) -> Result<Arc<dyn LogSink>, LogError>;

    /// The last lines, at most 200 and 8 KiB; empty when nothing was written.
    async fn tail(&self, build: ImageBuildId) -> Result<String, LogError>;

    /// Nobody writes any more: those who follow come to the end. Idempotent.
    async fn seal(&self, build: ImageBuildId) -> Result<(), LogError>;

    /// Forgets the log. Nothing there is success.
    async fn remove(&self, build: ImageBuildId) -> Result<(), LogError>;
}

/// Takes out of an output what must not be stored. Keeps back what may be the beginning of something secret.
pub trait Filter: Send {
    /// The part of the output that can be stored now.
    fn pass(&mut self, chunk: &[u8]) -> Vec<u8>;

    /// What was kept back, when nothing follows.
    fn finish(&mut self) -> Vec<u8>;
}

/// Makes a filter for one step's output.
pub trait Filters: Send + Sync + 'static {
    fn filter(&self, confidential: &Confidential) -> Box<dyn Filter>;
}
