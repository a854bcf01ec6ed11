//! The port behind which images are found and built.

use std::{collections::BTreeMap, time::Duration};

use async_trait::async_trait;
use sandglass_repository::{RepositorySpec, Source, SpecError};
use sandglass_sandbox::{
    ImageBuildId, ImageId, SandboxId,
    lifecycle::boot::Failure,
    source::{FoundImage, ImageNews, RepositorySource},
};

/// What a sandbox wants an image of.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    pub sandbox: SandboxId,
    /// Whose its builds and images are.
    pub namespace: Option<&'a str>,
    pub asked: &'a RepositorySource,
    /// As checked, credentials included.
    pub repository: &'a Source,
    pub build_secrets: &'a BTreeMap<String, String>,
    /// `linux/amd64`; that of the machine when absent.
    pub platform: Option<&'a str>,
}

/// Finds images for sandboxes and holds them. Every method may be called again.
#[async_trait]
pub trait Images: Send + Sync + 'static {
    /// Checks everything about a repository that needs neither network nor disk.
    ///
    /// # Errors
    /// The first field that is refused, with its code.
    fn check(&self, repository: &RepositorySpec) -> Result<Source, SpecError>;

    /// The longest time that a request may give a build; `None` for any.
    fn longest_build(&self) -> Option<Duration> {
        None
    }

    /// Finds an image or waits for the build of one, telling how far it is. The image is held for the sandbox when this returns. Dropped, it
    /// waits no longer; [`Images::release`] lets go of what there was by then.
    ///
    /// # Errors
    /// Why there is none, fit for the user.
    async fn find(
        &self,
        wanted: Wanted<'_>,
        told: &(dyn Fn(ImageNews) + Send + Sync),
    ) -> Result<FoundImage, Failure>;

    /// The newest image of the same repository and owner that can be used, this one included. `None`: it is not known.
    async fn newest(&self, image: ImageId) -> Option<ImageId>;

    /// A box was made of the image, or the runtime refused to.
    async fn made(&self, image: ImageId, made: bool);

    /// The sandbox neither waits for the build nor needs the image any more.
    ///
    /// # Errors
    /// A message; to be tried again.
    async fn release(
        &self,
        sandbox: SandboxId,
        build: Option<ImageBuildId>,
        image: Option<ImageId>,
    ) -> Result<(), String>;

    /// Lets go of everything that is held for sandboxes that are not `present`.
    async fn release_absent(&self, present: &(dyn Fn(SandboxId) -> bool + Sync));
}
