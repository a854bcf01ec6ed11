//! What clients report about their own creates.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A client finished a create, well or not.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct MetricsEvent {
    /// Always `sandbox.create`.
    #[serde(alias = "event_type")]
    pub event_type: String,
    #[serde(default, alias = "sandbox_id", skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    #[serde(alias = "create_duration_ms")]
    #[schema(minimum = 0)]
    pub create_duration_ms: i64,
    pub success: bool,
}
