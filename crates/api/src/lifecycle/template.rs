//! Templates: prepared images for fast sandboxes.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::StringMap;
use crate::time::WireTime;

/// When a template counts as ready.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = FsbTemplateReadiness)]
pub struct TemplateReadiness {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<String>,
    #[serde(default, alias = "warmup_seconds", skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 0)]
    pub warmup_seconds: Option<i64>,
}

/// What a template should be. Unknown keys are refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schema(as = CreateFsbTemplateRequest)]
pub struct CreateTemplateRequest {
    #[schema(min_length = 1)]
    pub image: String,
    #[serde(default, alias = "resource_limits", skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(min_items = 1)]
    pub entrypoint: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<TemplateReadiness>,
    #[schema(min_length = 1)]
    pub publish: String,
    /// `native` or `overlaybd`.
    #[serde(default = "default_format")]
    pub format: String,
}

fn default_format() -> String {
    "overlaybd".to_owned()
}

/// How far the build of a template is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = FsbTemplateStatus)]
pub struct TemplateStatus {
    /// `Pending`, `Building`, `Succeeded` or `Failed`.
    pub phase: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_ref: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A template.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = FsbTemplate)]
pub struct Template {
    pub template_id: String,
    pub image: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resource_limits: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<StringMap>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub readiness: Option<TemplateReadiness>,
    pub publish: String,
    pub format: String,
    pub status: TemplateStatus,
    pub created_at: WireTime,
    pub updated_at: WireTime,
}
