//! `POST /sandboxes`: what is asked for and what comes back.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    AgentRequest, BootRequest, CredentialProxyConfig, ImageBuildRequest, NetworkPolicy, PoliciesRequest,
    RepositoryRequest, SandboxSource, SandboxStatus, ServiceRequest, Volume,
};
use crate::time::WireTime;

/// Text to text, as labels, limits and extensions travel.
pub type StringMap = BTreeMap<String, String>;

/// Extension of ours: how the entrypoint is chosen when the request has none (`image` or `none`).
pub const ENTRYPOINT_EXTENSION: &str = "sandglass.entrypoint";
/// Extension: renew by this many seconds whenever the sandbox is used through the proxy.
pub const RENEW_ON_ACCESS_EXTENSION: &str = "access.renew.extend.seconds";
/// Extension of ours: a request to the sandbox resumes it when it is paused (`true` or `false`).
pub const WAKE_ON_ACCESS_EXTENSION: &str = "access.wake";
/// Extension: take the sandbox from a pool.
pub const POOL_REF_EXTENSION: &str = "poolRef";
/// Extensions that start like this are stored and echoed.
pub const ECHOED_EXTENSION_PREFIX: &str = "opensandbox.extensions.";

/// An image and how to get it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageSpec {
    pub uri: String,
    /// Never returned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub auth: Option<ImageAuth>,
}

/// Registry credentials of one request.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ImageAuth {
    pub username: String,
    pub password: String,
}

impl fmt::Debug for ImageAuth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ImageAuth(***)")
    }
}

/// Operating system (`linux`, `windows`) and architecture (`amd64`, `arm64`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PlatformSpec {
    pub os: String,
    pub arch: String,
}

/// Commands around the life of the sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = SandboxLifecycle)]
pub struct LifecycleHooks {
    #[serde(default, alias = "pre_start", skip_serializing_if = "Option::is_none")]
    pub pre_start: Option<LifecycleHook>,
    /// At most 60 seconds; 10 when it does not say.
    #[serde(default, alias = "pre_stop", skip_serializing_if = "Option::is_none")]
    pub pre_stop: Option<LifecycleHook>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub periodic: Option<Vec<PeriodicLifecycleHook>>,
}

/// A command that runs once, before the entrypoint or before the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LifecycleHook {
    #[schema(min_items = 1)]
    pub command: Vec<String>,
    #[serde(default, alias = "timeout_seconds", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 10800)]
    pub timeout_seconds: Option<i64>,
}

/// A command that runs on a schedule.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PeriodicLifecycleHook {
    #[schema(min_length = 1)]
    pub name: String,
    #[schema(min_length = 1)]
    pub schedule: String,
    #[schema(min_items = 1)]
    pub command: Vec<String>,
    #[serde(default, alias = "timeout_seconds", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 300)]
    pub timeout_seconds: Option<i64>,
}

/// What a sandbox should be.
#[derive(Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreateSandboxRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    /// Restore from this snapshot instead of starting from an image.
    #[serde(default, alias = "snapshot_id", skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    #[serde(default, alias = "template_id", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub template_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformSpec>,
    /// Seconds until the sandbox expires; absent or `null` means that it never does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 60)]
    pub timeout: Option<i64>,
    /// Required unless a template or a pool says it; may be empty. Keys: `cpu`, `memory`, `gpu`, `pids`.
    #[serde(default, alias = "resource_limits", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<StringMap>,
    #[serde(default, alias = "resource_requests", skip_serializing_if = "Option::is_none")]
    pub resource_requests: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, Option<String>>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lifecycle: Option<LifecycleHooks>,
    /// Required with an image unless the extension `sandglass.entrypoint` is `image` or `none`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_items = 1)]
    pub entrypoint: Option<Vec<String>>,
    #[serde(default, alias = "network_policy", skip_serializing_if = "Option::is_none")]
    pub network_policy: Option<NetworkPolicy>,
    #[serde(default, alias = "credential_proxy", skip_serializing_if = "Option::is_none")]
    pub credential_proxy: Option<CredentialProxyConfig>,
    #[serde(default, alias = "secure_access")]
    pub secure_access: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes: Option<Vec<Volume>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<StringMap>,
    /// Ours: requests to the sandbox resume it when it is paused. The same as the extension `access.wake`.
    #[serde(default, alias = "wake_on_access", skip_serializing_if = "Option::is_none")]
    pub wake_on_access: Option<bool>,
    /// Ours: work in this repository, in an image that is built for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<RepositoryRequest>,
    /// Only with a repository, like the four fields below.
    #[serde(default, alias = "image_build", skip_serializing_if = "Option::is_none")]
    pub image_build: Option<ImageBuildRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<Vec<ServiceRequest>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<PoliciesRequest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentRequest>,
}

impl fmt::Debug for CreateSandboxRequest {
    /// Environment values and policies may hold secrets, so only what identifies the request is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CreateSandboxRequest")
            .field("image", &self.image)
            .field("snapshot_id", &self.snapshot_id)
            .field("template_id", &self.template_id)
            .field("timeout", &self.timeout)
            .field("resource_limits", &self.resource_limits)
            .field("env", &self.env.as_ref().map(|env| env.keys().collect::<Vec<_>>()))
            .field("metadata", &self.metadata)
            .finish_non_exhaustive()
    }
}

/// The answer to a create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreateSandboxResponse {
    pub id: String,
    pub status: SandboxStatus,
    /// The request's map as it was sent, an explicit empty one included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<WireTime>,
    pub created_at: WireTime,
    /// Always present: the published clients require the key.
    pub entrypoint: Vec<String>,
    /// Of a sandbox that is made from a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SandboxSource>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
}
