//! What the create path and the HTTP edge ask for.

use std::{collections::BTreeMap, time::Duration};

use sandglass_builds::submission::Submission;
use sandglass_repository::{RepositorySpec, Source, SpecError, recipe::RecipeRequest};
use sandglass_sandbox::{ImageBuildId, ImageId, SandboxId};
use tokio_util::sync::CancellationToken;

use super::{
    BuildError, Builds, Ended, Image, ImageBuild, Located, Match, Origin, Policy, ResolveError,
    ResolveErrorKind, Secret, Submitted, TagName,
};

/// A repository as a source of an image.
#[derive(Debug, Clone)]
pub struct Order {
    /// The tenant's namespace; `None` on a server without tenants.
    pub namespace: Option<String>,
    /// As [`Builds::check`] answered it, credentials included.
    pub source: Source,
    pub recipe: RecipeRequest,
    /// Known to the build's steps alone, by the name of their variable.
    pub secrets: BTreeMap<String, Secret>,
    /// `linux/amd64`; that of the machine when absent.
    pub platform: Option<String>,
}

/// Under which conditions a sandbox wants an image; `imageBuild` of a request.
#[derive(Debug, Clone, Default)]
pub struct Want {
    pub policy: Policy,
    pub fit: Match,
    pub tag: Option<TagName>,
    /// How long all attempts of a build together may take; the configured time when absent.
    pub timeout: Option<Duration>,
}

/// The stable word for a source that could not be located, as in `status.reason`.
pub fn reason(kind: ResolveErrorKind) -> &'static str {
    match kind {
        ResolveErrorKind::Unreachable => "repository_unreachable",
        ResolveErrorKind::AuthFailed => "repository_auth_failed",
        ResolveErrorKind::RefNotFound => "ref_not_found",
        ResolveErrorKind::InvalidRecipe => "image_build_failed",
    }
}

impl Builds {
    /// Checks everything about a repository that needs neither network nor disk.
    ///
    /// # Errors
    /// The first field that is refused, with its code.
    pub fn check(&self, repository: &RepositorySpec) -> Result<Source, SpecError> {
        repository.validate(&self.inner.policy)
    }

    /// Asks the remotes for the commits, reads the recipe at them, and computes the keys. Takes as long as the remotes and the registry of the
    /// base image do, bounded by `builds.resolve_timeout_seconds`.
    ///
    /// # Errors
    /// The kind says why, the message is fit for the user.
    pub async fn locate(&self, order: &Order, cancel: &CancellationToken) -> Result<Located, ResolveError> {
        let locator = &self.inner.locator;
        let late = || {
            let message = format!("the repository was not found out within {} s", locator.timeout.as_secs());
            ResolveError::new(ResolveErrorKind::Unreachable, message)
        };
        tokio::time::timeout(locator.timeout, locator.locate(order, cancel)).await.map_err(|_| late())?
    }

    /// Finds the sandbox an image, or a build to wait for. The image is held for the sandbox, or the sandbox is among the build's waiters, when
    /// this returns; asking again is harmless.
    ///
    /// # Errors
    /// [`BuildError::Refused`] when the conditions cannot be met ([`super::Refusal::NotCached`] is `IMAGE::NOT_CACHED`), or the store fails.
    pub async fn submit(
        &self,
        located: &Located,
        want: &Want,
        waiter: SandboxId,
    ) -> Result<Submitted, BuildError> {
        self.inner
            .driver
            .submit(Submission {
                namespace: located.namespace.clone(),
                resolved: located.resolved.clone(),
                policy: want.policy,
                fit: want.fit,
                force: false,
                tag: want.tag.clone(),
                origin: Origin::Sandbox,
                waiter: Some(waiter.to_string()),
                timeout: self.timeout(want.timeout),
                metadata: BTreeMap::new(),
            })
            .await
    }

    /// Asks for a build itself, which runs whoever waits: the image that is there already, or the build.
    ///
    /// # Errors
    /// When it is refused, or the store fails.
    pub async fn order(
        &self,
        located: &Located,
        force: bool,
        want: &Want,
        metadata: BTreeMap<String, String>,
    ) -> Result<Submitted, BuildError> {
        self.inner
            .driver
            .submit(Submission {
                namespace: located.namespace.clone(),
                resolved: located.resolved.clone(),
                policy: Policy::IfMissing,
                fit: Match::Exact,
                force,
                tag: want.tag.clone(),
                origin: Origin::Explicit,
                waiter: None,
                timeout: self.timeout(want.timeout),
                metadata,
            })
            .await
    }

    fn timeout(&self, asked: Option<Duration>) -> Duration {
        asked.unwrap_or(self.inner.timeout).min(self.inner.max_timeout)
    }

    /// Waits for the end of a build: its image, or why there is none.
    ///
    /// # Errors
    /// When there is no such build, the store fails, or the server stops.
    pub async fn wait(&self, build: ImageBuildId) -> Result<Ended, BuildError> {
        self.inner.driver.wait(build).await
    }

    /// The build as the store has it.
    ///
    /// # Errors
    /// When there is none, or the store fails.
    pub async fn build(&self, build: ImageBuildId) -> Result<ImageBuild, BuildError> {
        self.inner.driver.build(build).await
    }

    /// The sandbox does not wait for the build any more, and does not need its image.
    ///
    /// # Errors
    /// When there is no such build, or the store fails.
    pub async fn leave(&self, build: ImageBuildId, waiter: SandboxId) -> Result<(), BuildError> {
        self.inner.driver.leave(build, &waiter.to_string()).await
    }

    /// The sandbox does not need the image any more.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn release(&self, image: ImageId, holder: SandboxId) -> Result<(), BuildError> {
        self.inner.driver.release(image, &holder.to_string()).await
    }

    /// A sandbox was made of the image.
    ///
    /// # Errors
    /// When there is no such image, or the store fails.
    pub async fn served(&self, image: ImageId) -> Result<(), BuildError> {
        self.inner.driver.served(image).await
    }

    /// The runtime refused to make a sandbox of the image. Twice in a row, and nobody is given it any more: submit again for another one.
    ///
    /// # Errors
    /// When there is no such image, or the store fails.
    pub async fn refused(&self, image: ImageId) -> Result<Image, BuildError> {
        self.inner.driver.refused(image).await
    }

    /// Takes away every waiter and holder that is no sandbox (any more). Called once the sandboxes were recovered.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn release_absent(&self, present: impl Fn(SandboxId) -> bool + Sync) -> Result<(), BuildError> {
        self.inner.driver.release_absent(|holder| holder.parse().is_ok_and(&present)).await
    }
}
