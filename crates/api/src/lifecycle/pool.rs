//! Pools of sandboxes kept warm by the runtime.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::{ImageBuildRequest, ImageSpec, PlatformSpec, RepositoryRequest, StringMap};
use crate::time::WireTime;

/// How many sandboxes a pool keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolCapacitySpec {
    #[serde(alias = "buffer_max")]
    #[schema(minimum = 0)]
    pub buffer_max: i64,
    #[serde(alias = "buffer_min")]
    #[schema(minimum = 0)]
    pub buffer_min: i64,
    #[serde(alias = "pool_max")]
    #[schema(minimum = 0)]
    pub pool_max: i64,
    #[serde(alias = "pool_min")]
    #[schema(minimum = 0)]
    pub pool_min: i64,
}

/// What a pool should be.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreatePoolRequest {
    #[schema(max_length = 253, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    pub name: String,
    /// A pod template, for Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub template: Option<Map<String, Value>>,
    /// On a single host, instead of a template: the image of its sandboxes, without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    /// On a single host, instead of an image: the repository of its sandboxes. A credential is named, `secretRef`, and not carried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<RepositoryRequest>,
    /// With a repository: how its image is built, without secrets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_build: Option<ImageBuildRequest>,
    /// With an image or a repository: the resources of each of its sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<StringMap>,
    /// With an image or a repository: the platform of its sandboxes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub platform: Option<PlatformSpec>,
    #[serde(alias = "capacity_spec")]
    pub capacity_spec: PoolCapacitySpec,
}

/// Resizes a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct UpdatePoolRequest {
    #[serde(alias = "capacity_spec")]
    pub capacity_spec: PoolCapacitySpec,
}

/// Why the last start of a sandbox for a pool failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolFailure {
    pub message: String,
    pub at: WireTime,
    /// How many have failed in a row.
    pub count: i64,
}

/// How full a pool is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct PoolStatus {
    pub total: i64,
    pub allocated: i64,
    pub available: i64,
    pub revision: String,
    /// Sandboxes that are being started for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub starting: Option<i64>,
    /// Absent when the last start succeeded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_failure: Option<PoolFailure>,
}

/// A pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = PoolResponse)]
pub struct Pool {
    pub name: String,
    pub capacity_spec: PoolCapacitySpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<PoolStatus>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at: Option<WireTime>,
    /// On a single host: the image of its sandboxes. Of a repository it is absent until the image is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<ImageSpec>,
    /// On a single host: the repository of its sandboxes, without credentials.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repository: Option<RepositoryRequest>,
}

/// All pools; pools are not paged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListPoolsResponse {
    pub items: Vec<Pool>,
}
