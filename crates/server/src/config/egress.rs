//! `[egress]`: the sidecar that enforces network policies.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::values::{Quantity, Secret};

choice! {
    EgressMode { Dns = "dns", DnsNft = "dns+nft" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct EgressConfig {
    /// Required once a request carries a network policy.
    pub image: Option<String>,
    pub mode: EgressMode,
    pub disable_ipv6: bool,
    pub otlp_endpoint: Option<String>,
    pub readiness_timeout: Duration,
    pub requests: BTreeMap<String, Quantity>,
    pub limits: BTreeMap<String, Quantity>,
    pub upstream_proxy: Option<UpstreamProxyConfig>,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            image: None,
            mode: EgressMode::Dns,
            disable_ipv6: true,
            otlp_endpoint: None,
            readiness_timeout: Duration::from_secs(30),
            requests: BTreeMap::new(),
            limits: BTreeMap::new(),
            upstream_proxy: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Default)]
pub struct UpstreamProxyConfig {
    pub url: String,
    pub authorization: Option<Secret>,
    pub ca_cert_path: Option<PathBuf>,
    pub ca_secret_name: Option<String>,
}
