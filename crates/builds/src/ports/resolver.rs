//! The ports beside engine, store and logs: remotes, secrets, and who wants to know.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use async_trait::async_trait;
use sandglass_sandbox::ImageBuildId;

use super::store::StoreError;
use crate::{
    build::ImageBuild,
    image::Image,
    prebuild::Prebuild,
    submission::{Confidential, Resolved},
};

/// What kind of trouble a remote made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResolveErrorKind {
    Unreachable,
    AuthFailed,
    RefNotFound,
    /// The repository's recipe cannot be read.
    InvalidRecipe,
}

/// A source that could not be resolved.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ResolveError {
    pub kind: ResolveErrorKind,
    pub message: String,
    /// The end of what git wrote, without secrets; absent when it is not git that failed.
    pub tail: Option<String>,
}

impl ResolveError {
    /// Without anything that git wrote.
    pub fn new(kind: ResolveErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), tail: None }
    }
}

/// Finds out the commits and keys of a prebuild's source.
#[async_trait]
pub trait Resolver: Send + Sync + 'static {
    async fn resolve(&self, prebuild: &Prebuild) -> Result<Resolved, ResolveError>;
}

/// Keeps what a build needs in confidence until it ended.
#[async_trait]
pub trait Vault: Send + Sync + 'static {
    async fn put(&self, build: ImageBuildId, confidential: &Confidential) -> Result<(), StoreError>;

    /// `None` when it is not known (any more).
    async fn get(&self, build: ImageBuildId) -> Result<Option<Confidential>, StoreError>;

    async fn forget(&self, build: ImageBuildId) -> Result<(), StoreError>;
}

/// A vault that forgets everything with its process. Builds with secrets then end as `secrets_lost`.
#[derive(Debug, Default)]
pub struct MemoryVault(Mutex<HashMap<ImageBuildId, Confidential>>);

#[async_trait]
impl Vault for MemoryVault {
    async fn put(&self, build: ImageBuildId, confidential: &Confidential) -> Result<(), StoreError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(build, confidential.clone());
        Ok(())
    }

    async fn get(&self, build: ImageBuildId) -> Result<Option<Confidential>, StoreError> {
        Ok(self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&build).cloned())
    }

    async fn forget(&self, build: ImageBuildId) -> Result<(), StoreError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(&build);
        Ok(())
    }
}

/// Told of every change after it was written, in the order in which this process wrote. Must return at once.
pub trait Observer: Send + Sync + 'static {
    fn build_changed(&self, before: Option<&ImageBuild>, after: &ImageBuild);

    fn image_changed(&self, after: &Image);
}

/// Nobody wants to know.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Observer for Silent {
    fn build_changed(&self, _: Option<&ImageBuild>, _: &ImageBuild) {}

    fn image_changed(&self, _: &Image) {}
}
