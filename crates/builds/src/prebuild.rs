//! Prebuilds: standing orders that keep the image of a repository's reference fresh.

use sandglass_sandbox::{ImageBuildId, PrebuildId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    image::Lineage,
    key::{BuildKey, TagName},
};

/// One prebuild as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Prebuild {
    pub id: PrebuildId,
    /// Grows with every write.
    pub version: u64,
    pub namespace: Option<String>,
    /// Repositories, reference and recipe, as the resolver reads them. No secrets.
    pub source: serde_json::Value,
    /// Seconds between two looks at the remote; `None`: only when told of a push, or asked.
    pub poll_seconds: Option<u64>,
    pub enabled: bool,
    /// Images of the lineage to keep besides the newest.
    pub keep: Option<u32>,
    pub tag: Option<TagName>,
    pub timeout_seconds: u64,
    pub schedule: Schedule,
    /// What the remote was last seen at.
    pub seen: Option<Seen>,
    /// Why the remote could not be read, since it last could.
    pub last_error: Option<String>,
    pub created_at: Timestamp,
}

/// When the remote is looked at next, and why. Pushes and requests are counted, so that one that comes during a look is not taken for answered
/// by it, and one whose look was cut off is not forgotten.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Schedule {
    pub next_poll_at: Option<Timestamp>,
    pub pushes: Answered,
    /// The first push that no look has answered yet.
    pub pushed_at: Option<Timestamp>,
    /// Requests for a look at once, also for a commit that failed before.
    pub requests: Answered,
    /// Somebody looks, and is believed to be at it until then.
    pub looking_until: Option<Timestamp>,
}

/// How many there were, and up to which one they were answered.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Answered {
    pub seen: u64,
    pub answered: u64,
}

impl Answered {
    pub fn pending(self) -> bool {
        self.seen > self.answered
    }
}

/// The commit that was last seen, and what was done about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Seen {
    pub key: BuildKey,
    pub lineage: Lineage,
    /// The build for it; `None` when there was an image already.
    pub build: Option<ImageBuildId>,
    pub at: Timestamp,
}
