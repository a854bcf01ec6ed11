//! What somebody asks for: an image for a key, and under which conditions.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::Duration,
};

use serde::{Deserialize, Serialize};

use crate::{
    build::{Cause, ImageBuild, Origin, Plan},
    image::Image,
    key::{BuildKey, RecipeKey, TagName},
};

use sandglass_sandbox::{ImageBuildId, Timestamp};

/// When to build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Policy {
    /// When no image fits.
    #[default]
    IfMissing,
    /// Whatever images there are.
    Always,
    /// Not at all: an image that fits is used, otherwise the sandbox starts from its base.
    Never,
    /// Not at all: without an image that fits the request is refused.
    RequireCached,
}

/// Which images fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Match {
    /// Of the same recipe, at any commit: the sandbox checks out its own when it starts.
    #[default]
    Compatible,
    /// Of the same recipe and commits.
    Exact,
}

/// How an image was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Fit {
    Exact,
    Compatible,
    Tagged,
}

/// A value that must not be shown: `Debug` says only that there is one.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl Secret {
    pub fn new(value: impl Into<String>) -> Self {
        Self(value.into())
    }

    /// The value itself.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What only the engine and the filter of the log may see.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Confidential {
    /// Build secrets by name.
    pub secrets: BTreeMap<String, Secret>,
    /// Credentials by the address of their repository, in the engine's spelling.
    pub credentials: BTreeMap<String, Secret>,
}

impl Confidential {
    pub fn is_empty(&self) -> bool {
        self.secrets.is_empty() && self.credentials.is_empty()
    }
}

/// A source whose commits and keys are known.
#[derive(Debug, Clone)]
pub struct Resolved {
    pub plan: Plan,
    pub key: BuildKey,
    pub recipe_key: RecipeKey,
    pub confidential: Confidential,
}

/// A request for an image.
#[derive(Debug, Clone)]
pub struct Submission {
    pub namespace: Option<String>,
    pub resolved: Resolved,
    pub policy: Policy,
    pub fit: Match,
    /// Builds although an image fits, and although the last build just failed.
    pub force: bool,
    /// Uses the image of that name if it fits; moved to the image that is built.
    pub tag: Option<TagName>,
    pub origin: Origin,
    /// Who waits, by the name under which it will use the image; the image is theirs until they release it.
    pub waiter: Option<String>,
    pub timeout: Duration,
    pub metadata: BTreeMap<String, String>,
}

impl Submission {
    pub(crate) fn tags(&self) -> BTreeSet<TagName> {
        self.tag.iter().cloned().collect()
    }
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Submitted {
    /// There is an image. Held for the waiter if there is one.
    Image { image: Box<Image>, fit: Fit, refreshing: Option<ImageBuildId> },
    /// A build is under way; the waiter is among its waiters.
    Build { build: Box<ImageBuild>, joined: Joined },
    /// No image, and none is to be built.
    WithoutImage,
}

/// Whether the build was under way before the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Joined {
    Began,
    Joined,
}

/// Why a request got neither an image nor a build.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no image of this repository fits, and the request forbids to build one")]
    NotCached,
    #[error("{0} builds wait for their turn already; try again later")]
    QueueFull(usize),
    #[error("the same build just failed, and is not tried again before {until}: {cause}")]
    FailedRecently { build: ImageBuildId, cause: Box<Cause>, until: Timestamp },
}
