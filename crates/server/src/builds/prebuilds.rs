//! Prebuilds of this server: what their source is.

use std::sync::Arc;

use async_trait::async_trait;
use sandglass_builds::{
    ports::{ResolveError, ResolveErrorKind, Resolver},
    prebuild::Prebuild,
    submission::Resolved,
};
use sandglass_repository::{Policy, RepositorySpec, recipe::RecipeRequest};
use serde::{Deserialize, Serialize};
use tokio_util::sync::CancellationToken;

use super::{locate::Locator, plain_order};

/// A prebuild's source as its row keeps it: without credentials, which no row holds.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PrebuildSource {
    pub repository: RepositorySpec,
    #[serde(default)]
    pub recipe: RecipeRequest,
}

/// Finds out the commits and keys of prebuilds.
pub(super) struct PrebuildResolver {
    pub(super) locator: Arc<Locator>,
    pub(super) policy: Policy,
}

#[async_trait]
impl Resolver for PrebuildResolver {
    async fn resolve(&self, prebuild: &Prebuild) -> Result<Resolved, ResolveError> {
        let unusable = |message: String| ResolveError::new(ResolveErrorKind::InvalidRecipe, message);
        let source: PrebuildSource =
            serde_json::from_value(prebuild.source.clone()).map_err(|error| unusable(error.to_string()))?;
        // Again: what is allowed may have been changed since.
        let checked =
            source.repository.validate(&self.policy).map_err(|error| unusable(error.to_string()))?;
        let order = plain_order(prebuild.namespace.clone(), checked, source.recipe);
        let located = self.locator.locate(&order, &CancellationToken::new()).await?;
        Ok(located.resolved)
    }
}
