//! What a sandbox that is made from a repository was asked to be, and what was found for it.
//!
//! Part of a [`Spec`](crate::spec::Spec), so it is kept with the box. Holds no secret: credentials and build secrets live apart, in the
//! memory of the server and in a file that only it can read.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    ids::{ImageBuildId, ImageId},
    lifecycle::intent::Progress,
    workspace::{Hook, OnFailure, Service, Source},
};

/// The `repository` of a request with everything that goes with it, checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RepositorySource {
    /// Whose its builds and images are; `None` on a server without tenants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// The primary repository first, then the others in their order.
    pub repositories: Vec<Declared>,
    /// Commits of history; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    #[serde(default)]
    pub submodules: bool,
    #[serde(default)]
    pub lfs: bool,
    pub image_build: ImageBuild,
    #[serde(default)]
    pub boot: BootOptions,
    /// In the order in which they are started.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<Service>,
    pub lease: Lease,
    /// Seconds of life, counted from when the box is made. `None`: it never expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ttl_seconds: Option<u64>,
    /// The image, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<FoundImage>,
    /// Images that were found before and that no box could be made of, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rejected: Vec<RejectedImage>,
}

impl RepositorySource {
    /// What there is to say of images that could not be used.
    pub fn detour(&self) -> Option<String> {
        let RejectedImage { image, message } = self.rejected.last()?;
        Some(format!(
            "image {image} could not be used ({message}), so it is made of another one or of its base"
        ))
    }
}

/// An image that a build made and that no box could be made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RejectedImage {
    pub image: ImageId,
    /// What the runtime said.
    pub message: String,
}

/// One repository, as checked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Declared {
    /// Normalised, without user information.
    pub url: String,
    /// Branch, tag or commit; the remote's default branch when absent.
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Absolute, below the workspace's root.
    pub path: String,
    /// Whether the request came with a credential for it.
    #[serde(default)]
    pub credential: bool,
}

/// Under which conditions an image is built. Words are those of the request.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuild {
    pub policy: BuildPolicy,
    #[serde(rename = "match")]
    pub fit: BuildMatch,
    /// Movable name of an image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `imageBuild.recipe` as it was asked for; null for `auto`.
    #[serde(default, skip_serializing_if = "Value::is_null")]
    pub recipe: Value,
    /// All attempts of the build together; the server's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

/// When to build.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BuildPolicy {
    #[default]
    IfMissing,
    Always,
    Never,
    RequireCached,
}

/// Which images fit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BuildMatch {
    #[default]
    Compatible,
    Exact,
}

/// `boot` of the request.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BootOptions {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_sync_failure: Option<OnFailure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_setup_failure: Option<OnFailure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub on_start_failure: Option<OnFailure>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub setup_timeout_seconds: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start_timeout_seconds: Option<u64>,
}

/// `agent` of the request: how the agent's life is judged. Whole seconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    pub heartbeat_interval_seconds: u64,
    /// Silence after which the sandbox counts as unresponsive. More than the interval.
    pub heartbeat_timeout_seconds: u64,
}

impl Default for Lease {
    fn default() -> Self {
        Self { heartbeat_interval_seconds: 15, heartbeat_timeout_seconds: 45 }
    }
}

/// The image that the box is made of, and what goes with it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FoundImage {
    /// What the runtime takes as the image.
    pub reference: String,
    /// The image, when a build made it: it is held for the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageId>,
    /// The build that was waited for, or that made the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub build: Option<ImageBuildId>,
    /// How it was found; `None` where that was not written down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cache: Option<CacheResult>,
    /// How it fits; `None` where nothing was built, and where that was not written down.
    #[serde(default, rename = "match", skip_serializing_if = "Option::is_none")]
    pub fit: Option<ImageMatch>,
    /// Full commits by path in the box.
    pub commits: BTreeMap<String, String>,
    /// Full names of the refs by path in the box. What was asked for by its commit has none.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub refs: BTreeMap<String, String>,
    /// Whether setup has run in it.
    pub source: Source,
    /// Who works in the repositories, where the recipe names somebody.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub setup: Vec<Hook>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub start: Vec<Hook>,
    /// Environment that the recipe gives to everything; the request's own comes on top.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
}

/// How an image fits what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum ImageMatch {
    /// It is of these commits.
    Exact,
    /// It is of other commits of the same recipe; the boot goes on from there to those that were asked for.
    Compatible,
    /// It is the one that the request named by its tag.
    Tag,
}

impl ImageMatch {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Compatible => "compatible",
            Self::Tag => "tag",
        }
    }
}

/// What a create hears while its image is looked for.
#[derive(Debug, Clone, PartialEq)]
pub enum ImageNews {
    /// Where the create stands from now on.
    Stands(Progress),
    /// A step of the build that it waits for has another state. What several changes between two looks led to is told once.
    Step(BuildStep),
}

/// One step of a build, in the words of the build's own events.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BuildStep {
    pub image_build_id: ImageBuildId,
    /// `resolve`, `clone`, `build`, `setup`, `sanitize` or `export`.
    pub step: String,
    /// `Running`, `Succeeded`, `Failed` or `Cancelled`.
    pub state: String,
    /// From 1.
    pub attempt: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

/// What of an image was there before somebody asked for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CacheResult {
    /// An image of these commits, or the one that the request named.
    Hit,
    /// An image of other commits of the same recipe.
    Behind,
    /// Nothing that fitted: it was built, or somebody else's build was waited for.
    Built,
    /// Nothing, and nothing was built: the recipe's base.
    Base,
}

impl CacheResult {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Hit => "hit",
            Self::Behind => "behind",
            Self::Built => "built",
            Self::Base => "base",
        }
    }
}
