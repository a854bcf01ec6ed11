//! Image builds, the images they make, and prebuilds. Routes of ours; the lifecycle API has none for this.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

use crate::time::WireTime;

/// Asks for the build of an image.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CreateImageBuildRequest {
    /// `{url, ref?, depth?, submodules?, lfs?, path?, credential?, additional?}`; the credential is write-only.
    #[schema(value_type = Object)]
    pub repository: Value,
    /// `{type: auto | dockerfile | devcontainer | hooks | none, …}`; `auto` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    pub recipe: Option<Value>,
    /// Known to the build's steps alone, by name. Write-only.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub secrets: BTreeMap<String, String>,
    /// A name that is moved to the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// All attempts together, at least 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// `linux/amd64`; the machine's own when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<String>,
    /// Builds although there is an image, and although the last build just failed.
    #[serde(default)]
    pub force: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub metadata: BTreeMap<String, String>,
}

/// Where a build stands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuildStatus {
    /// `Queued`, `Running`, `Finalizing`, `Succeeded`, `Failed`, `Cancelled`, `TimedOut` or `Superseded`.
    pub state: String,
    /// The step that runs, or a stable word for why it ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    pub last_transition_at: WireTime,
}

/// A repository at a commit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuiltRepository {
    pub url: String,
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    pub commit: String,
    /// Where it is in the image.
    pub path: String,
}

/// One step of the current attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuildStep {
    /// `resolve`, `clone`, `build`, `setup`, `sanitize` or `export`.
    pub name: String,
    pub state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

/// Why there is no image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuildFailure {
    pub reason: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    pub message: String,
    /// The last lines of the log, at most 200 and 8 KiB.
    pub output_tail: String,
}

/// What a build could go by.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuildCache {
    /// Whether the request was answered by an image that was there.
    pub hit: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_image_id: Option<String>,
}

/// A build of an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct ImageBuild {
    pub id: String,
    pub key: String,
    pub recipe_key: String,
    pub status: ImageBuildStatus,
    pub repository: BuiltRepository,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub additional: Vec<BuiltRepository>,
    /// `dockerfile`, `devcontainer`, `hooks` or `none`.
    pub recipe: String,
    pub platform: String,
    /// Attempts begun; the first is 1.
    pub attempt: u32,
    pub cache: ImageBuildCache,
    /// How many wait for the image.
    pub waiters: usize,
    pub steps: Vec<ImageBuildStep>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<ImageBuildFailure>,
    /// Bytes of output that were ever written.
    pub log_bytes: u64,
    pub created_at: WireTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started_at: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<WireTime>,
    pub deadline_at: WireTime,
    pub metadata: BTreeMap<String, String>,
    /// In the answer to a request: the build was under way already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deduplicated: Option<bool>,
}

/// An image that a build made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuiltImage {
    pub id: String,
    pub key: String,
    pub recipe_key: String,
    /// Which repository it is of, as tags and lists name it.
    pub repository_key: String,
    /// What a sandbox takes as its image.
    pub reference: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<String>,
    pub size_bytes: u64,
    /// The commit at each path.
    pub commits: BTreeMap<String, String>,
    pub agent_generation: u32,
    pub platform: String,
    /// `Ready`, `Superseded`, `Quarantined`, `Deleting` or `Deleted`.
    pub state: String,
    pub tags: Vec<String>,
    pub image_build_id: String,
    /// How many sandboxes and builds use it.
    pub sandbox_count: u64,
    /// Creations that it was refused for since it last served.
    pub restore_failures: u32,
    pub created_at: WireTime,
    pub last_used_at: WireTime,
}

/// Moves a name to an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MoveTagRequest {
    pub image_id: String,
}

/// A standing order that keeps the image of a repository's reference fresh.
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PrebuildRequest {
    /// As of a build; its credential may only name one of the server's secrets, `secretRef`, and is not shown.
    #[schema(value_type = Object)]
    pub repository: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Object)]
    pub recipe: Option<Value>,
    /// Instead of `repository.ref`.
    #[serde(rename = "ref", default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
    /// Seconds between two looks at the remote, from 60 to 2592000; only when told of a push, or asked, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_seconds: Option<u64>,
    #[serde(default = "yes")]
    pub enabled: bool,
    /// Images to keep besides the newest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
    /// What pushes are signed with; without one they are refused. Write-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub webhook_secret: Option<String>,
}

fn yes() -> bool {
    true
}

/// A prebuild.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Prebuild {
    pub id: String,
    #[schema(value_type = Object)]
    pub repository: Value,
    #[schema(value_type = Object)]
    pub recipe: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub poll_seconds: Option<u64>,
    pub enabled: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    pub timeout_seconds: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_poll_at: Option<WireTime>,
    /// The build of the commit that was last seen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_build_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub seen_at: Option<WireTime>,
    /// Why the remote could not be read, since it last could.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    pub created_at: WireTime,
}
