//! Storage made visible inside a sandbox.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// One mount; exactly one of `host`, `pvc` and `ossfs`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Volume {
    #[schema(max_length = 63, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    pub name: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<HostVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pvc: Option<PvcVolume>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ossfs: Option<OssfsVolume>,
    #[serde(alias = "mount_path")]
    #[schema(pattern = "^/.*")]
    pub mount_path: String,
    #[serde(default, alias = "read_only")]
    pub read_only: bool,
    #[serde(default, alias = "sub_path", skip_serializing_if = "Option::is_none")]
    pub sub_path: Option<String>,
}

/// A directory of the host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Host)]
pub struct HostVolume {
    #[schema(pattern = r"^(/|[A-Za-z]:[\\/])")]
    pub path: String,
}

/// A named volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = PVC)]
pub struct PvcVolume {
    #[serde(alias = "claim_name")]
    #[schema(max_length = 253, pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
    pub claim_name: String,
    #[serde(default = "yes", alias = "create_if_not_exists")]
    pub create_if_not_exists: bool,
    #[serde(default, alias = "delete_on_sandbox_termination")]
    pub delete_on_sandbox_termination: bool,
    #[serde(default, alias = "storage_class", skip_serializing_if = "Option::is_none")]
    pub storage_class: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = r"^\d+(\.\d+)?(Ki|Mi|Gi|Ti|Pi|Ei)?$")]
    pub storage: Option<String>,
    #[serde(default, alias = "access_modes", skip_serializing_if = "Option::is_none")]
    pub access_modes: Option<Vec<String>>,
}

fn yes() -> bool {
    true
}

/// An object storage bucket.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
#[schema(as = OSSFS)]
pub struct OssfsVolume {
    #[schema(min_length = 3, max_length = 63)]
    pub bucket: String,
    #[schema(min_length = 1)]
    pub endpoint: String,
    /// `1.0` or `2.0`.
    #[serde(default = "current_ossfs")]
    pub version: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub options: Option<Vec<String>>,
    #[serde(default, alias = "access_key_id", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub access_key_id: Option<String>,
    #[serde(default, alias = "access_key_secret", skip_serializing_if = "Option::is_none")]
    #[schema(min_length = 1)]
    pub access_key_secret: Option<String>,
}

fn current_ossfs() -> String {
    "2.0".to_owned()
}

impl fmt::Debug for OssfsVolume {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OssfsVolume")
            .field("bucket", &self.bucket)
            .field("endpoint", &self.endpoint)
            .finish_non_exhaustive()
    }
}
