//! `[tenants]`: its presence makes the server multi-tenant.

use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::values::Secret;

choice! {
    TenantProvider { File = "file", Http = "http" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct TenantsConfig {
    pub provider: TenantProvider,
    /// The tenants file. Set only through the environment, as upstream.
    pub file: PathBuf,
    pub endpoint: Option<String>,
    pub max_stale: Duration,
    pub timeout: Duration,
    pub auth_header: Option<String>,
    pub auth_token: Option<Secret>,
}

impl Default for TenantsConfig {
    fn default() -> Self {
        Self {
            provider: TenantProvider::File,
            file: PathBuf::from("~/.opensandbox/tenants.toml"),
            endpoint: None,
            max_stale: Duration::from_secs(300),
            timeout: Duration::from_secs(5),
            auth_header: None,
            auth_token: None,
        }
    }
}
