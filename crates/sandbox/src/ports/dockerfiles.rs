//! The Dockerfile port: engines that build Dockerfiles by themselves, and keep what each instruction made.

use std::{collections::BTreeMap, path::PathBuf};

use async_trait::async_trait;

use super::runtime::RuntimeError;
use crate::spec::Limits;

/// What is to be built.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DockerfileBuild {
    /// What the image is called afterwards. An image of that name loses it.
    pub name: String,
    /// An archive of the build context on this machine, the Dockerfile in it. It is all that the engine sees: no secret is in it.
    pub context: PathBuf,
    /// The Dockerfile's path in the context.
    pub dockerfile: String,
    /// The stage that is wanted; the last one when absent.
    pub target: Option<String>,
    pub args: BTreeMap<String, String>,
    pub labels: BTreeMap<String, String>,
    /// `os/arch`; the engine's own when absent.
    pub platform: Option<String>,
    /// Of each instruction that runs something.
    pub limits: Limits,
    /// Whether nothing is taken of what earlier builds made.
    pub fresh: bool,
}

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum DockerfileError {
    /// The Dockerfile is to blame: an instruction failed, or cannot be carried out.
    #[error("{message}")]
    Instruction {
        /// Of the command that failed, where one did.
        exit_code: Option<i32>,
        message: String,
    },
    #[error(transparent)]
    Engine(#[from] RuntimeError),
}

/// Takes what a build says, line by line, without line breaks.
pub type BuildOutput<'o> = dyn Fn(&str) + Send + Sync + 'o;

/// See the module documentation.
#[async_trait]
pub trait Dockerfiles: Send + Sync + 'static {
    /// Builds. Dropped, the engine ends what it does and no image of this name comes to be.
    ///
    /// Secrets have no way in; Dockerfiles that want some are not for this port.
    async fn build(&self, wanted: &DockerfileBuild, output: &BuildOutput<'_>) -> Result<(), DockerfileError>;

    /// What a local image has done first in every build that starts from it (`ONBUILD`), instruction by instruction, as the engine will read
    /// it. `NotFound` when the image is not here.
    async fn triggers(&self, image: &str) -> Result<Vec<String>, RuntimeError>;
}
