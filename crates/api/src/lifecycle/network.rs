//! Egress policies as the lifecycle API sees them; the words in them belong to whatever enforces them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which hosts a sandbox may reach.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct NetworkPolicy {
    #[serde(default, alias = "default_action", skip_serializing_if = "Option::is_none")]
    pub default_action: Option<String>,
    #[serde(default)]
    pub egress: Vec<NetworkRule>,
}

/// One rule of a policy.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NetworkRule {
    pub action: String,
    #[schema(min_length = 1)]
    pub target: String,
}

/// Whether credentials are injected into outgoing requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CredentialProxyConfig {
    #[serde(default)]
    pub enabled: bool,
}
