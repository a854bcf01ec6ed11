//! Prebuilds of this server: what their source is.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use sandglass_builds::{
    ports::{ResolveError, ResolveErrorKind, Resolver},
    prebuild::Prebuild,
    submission::Resolved,
};
use sandglass_repository::{Policy, RepositorySpec, recipe::RecipeRequest};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

use super::{locate::Locator, plain_order};
use crate::workspace::{SecretFiles, secrets};

/// A prebuild's source as its row keeps it: secrets by their names alone, which are looked up at every look.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrebuildSource {
    /// As it was asked for.
    pub repository: Value,
    #[serde(default)]
    pub recipe: RecipeRequest,
    /// Whose secrets are meant, where there are tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
}

/// Finds out the commits and keys of prebuilds.
pub(super) struct PrebuildResolver {
    pub(super) locator: Arc<Locator>,
    pub(super) policy: Policy,
    /// Of secrets that are named; `None` where there are none.
    pub(super) secrets_dir: Option<PathBuf>,
}

impl PrebuildResolver {
    /// With the secrets that it names, as they are now.
    async fn repository(&self, source: &PrebuildSource) -> Result<RepositorySpec, ResolveError> {
        let (named, tenant) = (source.repository.clone(), source.tenant.clone());
        let folder = self.secrets_dir.clone();
        let read = tokio::task::spawn_blocking(move || {
            secrets::resolved(named, SecretFiles(folder.as_deref()), tenant.as_deref())
        });
        let failed = |kind, error: &dyn std::fmt::Display| ResolveError::new(kind, error.to_string());
        let read = read.await.map_err(|error| failed(ResolveErrorKind::Unreachable, &error))?;
        let known = read.map_err(|error| failed(ResolveErrorKind::AuthFailed, &error))?;
        // The reader's own message could repeat a secret.
        serde_json::from_value(known)
            .map_err(|_| failed(ResolveErrorKind::InvalidRecipe, &"the repository is not understood"))
    }
}

#[async_trait]
impl Resolver for PrebuildResolver {
    async fn resolve(&self, prebuild: &Prebuild) -> Result<Resolved, ResolveError> {
        let unusable = |message: String| ResolveError::new(ResolveErrorKind::InvalidRecipe, message);
        let source: PrebuildSource =
            serde_json::from_value(prebuild.source.clone()).map_err(|error| unusable(error.to_string()))?;
        // Again: what is allowed may have been changed since.
        let repository = self.repository(&source).await?;
        let checked = repository.validate(&self.policy).map_err(|error| unusable(error.to_string()))?;
        let order = plain_order(prebuild.namespace.clone(), checked, source.recipe);
        let located = self.locator.locate(&order, &CancellationToken::new()).await?;
        Ok(located.resolved)
    }
}
