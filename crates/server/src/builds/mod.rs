//! Image builds in the server: from a repository to an image that a sandbox is made of.
//!
//! Owns what the orchestration of `sandglass-builds` needs of this server (git, the runtime, disk and database behind its ports) and the one
//! handle, [`Builds`], that the create path and the HTTP edge use. Does not own the decisions about builds, nor sandboxes.
//!
//! The way of a sandbox that starts from a repository:
//!
//! 1. [`Builds::check`] while the request is answered: grammar, schemes, hosts, paths.
//! 2. [`Builds::locate`] in the background: commits, recipe and keys. Its failures are the reasons `repository_unreachable`,
//!    `repository_auth_failed`, `ref_not_found` and `image_build_failed` (an unreadable recipe), see [`reason`].
//! 3. [`Builds::submit`] with the sandbox as waiter: an image, which is held for the sandbox from then on; a build to wait for; or neither.
//! 4. [`Builds::wait`] when it is a build. The image is held for every sandbox that waited when the build succeeds.
//! 5. [`Builds::served`] or [`Builds::refused`] when the sandbox could or could not be made of the image.
//! 6. [`Builds::leave`] when the sandbox goes while it waits, [`Builds::release`] when it goes later. Both are idempotent.
//!
//! After a restart [`Builds::release_absent`] is told which sandboxes there are.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

pub use sandglass_builds::{
    build::{Cause, CauseKind, ImageBuild},
    driver::{BuildError, Ended},
    image::Image,
    key::TagName,
    ports::{ResolveError, ResolveErrorKind},
    submission::{Fit, Joined, Match, Policy, Refusal, Secret, Submitted},
};
use sandglass_repository::{
    RepositorySpec, Source, SpecError,
    recipe::{Recipe, RecipeRequest},
};
use sandglass_sandbox::{ImageBuildId, ImageId, SandboxId};
use tokio_util::sync::CancellationToken;

/// The builds of this server. Cheap to clone.
#[derive(Clone)]
pub struct Builds {
    inner: Arc<Inner>,
}

struct Inner {
    driver: sandglass_builds::Builds,
}

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

/// One repository whose commit is known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocatedMember {
    /// Without credentials.
    pub url: String,
    /// Absolute path in the sandbox.
    pub path: String,
    /// What was asked for; `None`: the remote's HEAD.
    pub reference: Option<String>,
    /// The full commit it stands for.
    pub commit: String,
    /// Of the ref: `refs/heads/main`; absent for commits.
    pub full_name: Option<String>,
}

/// A source whose commits, recipe and keys are known.
#[derive(Debug, Clone)]
pub struct Located {
    /// The primary repository first.
    pub members: Vec<LocatedMember>,
    /// With what runs at every boot: `start`, `remote_env`, `remote_user`.
    pub recipe: Arc<Recipe>,
    /// What a sandbox starts from when there is no image of the repository: the recipe's base, or the server's own. `None` when only a build
    /// makes one, which is so for a Dockerfile.
    pub base_image: Option<String>,
    pub resolved: sandglass_builds::submission::Resolved,
    namespace: Option<String>,
}

/// Under which conditions a sandbox wants an image; `imageBuild` of a request.
#[derive(Debug, Clone)]
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
    pub fn check(&self, _repository: &RepositorySpec) -> Result<Source, SpecError> {
        todo!()
    }

    /// Asks the remotes for the commits, reads the recipe at them, and computes the keys. Takes as long as the remotes do, bounded by
    /// `builds.resolve_timeout`.
    ///
    /// # Errors
    /// The kind says why, the message is fit for the user.
    pub async fn locate(&self, _order: &Order, _cancel: &CancellationToken) -> Result<Located, ResolveError> {
        todo!()
    }

    /// Finds the sandbox an image, or a build to wait for. The image is held for the sandbox, or the sandbox is among the build's waiters, when
    /// this returns; asking again is harmless.
    ///
    /// # Errors
    /// [`BuildError::Refused`] when the conditions cannot be met ([`Refusal::NotCached`] is `IMAGE::NOT_CACHED`), or the store fails.
    pub async fn submit(
        &self,
        located: &Located,
        want: &Want,
        waiter: SandboxId,
    ) -> Result<Submitted, BuildError> {
        let _ = (located, want, waiter, &located.namespace);
        todo!()
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

    /// Stops working and returns when nothing runs any more. Builds that were under way are begun again by the next server.
    pub async fn shut(&self) {
        self.inner.driver.shut().await;
    }
}
