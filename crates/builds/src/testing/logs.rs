//! Logs in memory.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;

use crate::{
    build::StepName,
    logs::last_lines,
    ports::{LogError, LogSink, Logs},
};

type All = Arc<Mutex<HashMap<ImageBuildId, Vec<u8>>>>;

/// Keeps everything.
#[derive(Debug, Default)]
pub struct MemoryLogs(All);

struct Sink(All, ImageBuildId);

fn all(logs: &All) -> MutexGuard<'_, HashMap<ImageBuildId, Vec<u8>>> {
    logs.lock().unwrap_or_else(PoisonError::into_inner)
}

impl MemoryLogs {
    /// What was written of a build.
    pub fn text(&self, build: ImageBuildId) -> String {
        all(&self.0).get(&build).map(|bytes| String::from_utf8_lossy(bytes).into_owned()).unwrap_or_default()
    }
}

#[async_trait]
impl LogSink for Sink {
    async fn write(&self, _: StepName, chunk: &[u8]) {
        all(&self.0).entry(self.1).or_default().extend_from_slice(chunk);
    }
}

#[async_trait]
impl Logs for MemoryLogs {
    async fn open(&self, build: ImageBuildId) -> Result<Arc<dyn LogSink>, LogError> {
        Ok(Arc::new(Sink(self.0.clone(), build)))
    }

    async fn tail(&self, build: ImageBuildId) -> Result<String, LogError> {
        Ok(all(&self.0).get(&build).map(|bytes| last_lines(bytes, false)).unwrap_or_default())
    }

    async fn seal(&self, _: ImageBuildId) -> Result<(), LogError> {
        Ok(())
    }

    async fn remove(&self, build: ImageBuildId) -> Result<(), LogError> {
        all(&self.0).remove(&build);
        Ok(())
    }
}
