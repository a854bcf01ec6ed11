//! The capture port: a box's files kept as an image under a name, for runtimes that can.

use std::collections::BTreeMap;

use async_trait::async_trait;

use super::runtime::RuntimeError;
use crate::ids::SandboxId;

/// How an image is run: what its configuration says beside its files.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RunConfig {
    pub env: Vec<(String, String)>,
    /// `uid[:gid]` or `name[:group]`; empty is root.
    pub user: String,
    /// Empty is `/`.
    pub working_dir: String,
    pub entrypoint: Vec<String>,
    pub cmd: Vec<String>,
    pub labels: BTreeMap<String, String>,
    pub stop_signal: Option<String>,
    /// Such as `80/tcp`.
    pub exposed_ports: Vec<String>,
}

/// A local image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocalImage {
    /// What a sandbox takes as its image.
    pub reference: String,
    /// By content.
    pub digest: String,
    pub size_bytes: u64,
    pub config: RunConfig,
}

/// What a capture made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Captured {
    pub image: LocalImage,
    /// What of the box is not in it and why, in words for the user.
    pub left_out: Vec<String>,
}

/// Makes images of boxes, finds and removes them. Every method is idempotent by name.
#[async_trait]
pub trait Captures: Send + Sync + 'static {
    /// Keeps the box's files under the name, with this configuration in place of its image's. The box may be frozen afterwards. An image of
    /// that name is replaced.
    ///
    /// `Unavailable` only if nothing was done.
    async fn capture(&self, id: SandboxId, name: &str, config: &RunConfig) -> Result<Captured, RuntimeError>;

    /// The local image of this name or reference; `None` only if there surely is none.
    async fn find(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError>;

    /// Whether an image that is captured holds only what its box changed, and boxes of it are made at once: then it pays to keep what single
    /// steps of a build made.
    fn layered(&self) -> bool {
        false
    }

    /// Removes the image of this name. Absent is success; `InUse` while a box is made from it.
    async fn remove(&self, name: &str) -> Result<(), RuntimeError>;
}
