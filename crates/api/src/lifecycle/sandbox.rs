//! A sandbox as it is read, and the small requests about one.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{
    ImageSpec, PlatformSpec, SandboxAgent, SandboxFailure, SandboxPolicies, SandboxProgress, SandboxService,
    SandboxSource, StringMap,
};
use crate::time::WireTime;

/// Where a sandbox is in its life.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxStatus {
    /// `Pending`, `Running`, `Pausing`, `Paused`, `Resuming`, `Stopping`, `Terminated` or `Failed`; clients must
    /// tolerate others.
    pub state: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_at: Option<WireTime>,
}

/// The pool that a sandbox was taken from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct AllocationSummary {
    /// Always `pool`.
    pub mode: String,
    pub pool_ref: String,
    /// Always `allocated`.
    pub state: String,
}

/// A sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Sandbox {
    pub id: String,
    /// Absent for a sandbox restored from a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformSpec>,
    pub status: SandboxStatus,
    /// Left out when empty.
    #[serde(default, skip_serializing_if = "StringMap::is_empty")]
    pub metadata: StringMap,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub extensions: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocation: Option<AllocationSummary>,
    /// Always present: the published clients require the key.
    #[serde(default)]
    pub entrypoint: Vec<String>,
    /// Absent: the sandbox never expires.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<WireTime>,
    pub created_at: WireTime,
    /// Of a sandbox that is made from a repository, like all below but the last three.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<SandboxSource>,
    /// Counts the boxes that the sandbox has had.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub generation: Option<u64>,
    /// Until it is ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<SandboxProgress>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<SandboxAgent>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub services: Option<Vec<SandboxService>>,
    /// Since it was first ready.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uptime_seconds: Option<u64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<SandboxFailure>,
    /// Of a sandbox that was created with policies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policies: Option<SandboxPolicies>,
    /// The state in the short dialect: `SCHEDULED`, `BUILDING`, `STARTING`, `READY`, `UNHEALTHY`, `PAUSED`, `STOPPING`,
    /// `STOPPED` or `FAILED`.
    #[serde(rename = "state", default, skip_serializing_if = "Option::is_none")]
    pub seed_state: Option<String>,
    /// `uptimeSeconds` in the short dialect; 0 before it was ready.
    #[serde(rename = "uptime_seconds", default, skip_serializing_if = "Option::is_none")]
    pub seed_uptime_seconds: Option<u64>,
}

/// How to reach a port of a sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Endpoint {
    /// `host[:port][/path]` without a scheme: clients prepend their own and append paths.
    pub endpoint: String,
    /// To be sent with every request to the endpoint.
    #[serde(default, skip_serializing_if = "StringMap::is_empty")]
    pub headers: StringMap,
}

/// Moves the expiry of a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RenewSandboxExpirationRequest)]
pub struct RenewRequest {
    #[serde(alias = "expires_at")]
    pub expires_at: WireTime,
}

/// The expiry as it now is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = RenewSandboxExpirationResponse)]
pub struct RenewResponse {
    pub expires_at: WireTime,
}

/// `{"status":"healthy"}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    pub status: String,
}

/// The version of the server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Version {
    pub version: String,
}
