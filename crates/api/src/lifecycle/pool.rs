//! Pools of sandboxes kept warm by the runtime.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

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
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct CreatePoolRequest {
    #[schema(max_length = 253, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    pub name: String,
    #[schema(value_type = Object)]
    pub template: Map<String, Value>,
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

/// How full a pool is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolStatus {
    pub total: i64,
    pub allocated: i64,
    pub available: i64,
    pub revision: String,
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
}

/// All pools; pools are not paged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ListPoolsResponse {
    pub items: Vec<Pool>,
}
