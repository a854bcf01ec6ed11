//! `[egress]`: what enforces network policies.

use std::collections::BTreeMap;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{Flag, Maybe, SecretText, Span, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::{Endpoint, Quantity, Secret};

choice! {
    EgressMode { Dns = "dns", DnsNft = "dns+nft" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct EgressConfig {
    /// `None`: the server's own enforcer.
    pub image: Option<String>,
    pub mode: EgressMode,
    pub disable_ipv6: bool,
    pub otlp_endpoint: Option<Endpoint>,
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
    /// A path on the engine's host, which may be another machine.
    pub ca_cert_path: Option<String>,
    pub ca_secret_name: Option<String>,
}

impl EgressConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "image",
            Maybe(Text::any()),
            &mut self.image,
            "Image of another enforcer, run as the sidecar of sandboxes with a policy; unset: Sandglass's own (Docker).",
        );
        section.key(
            "mode",
            Words::new(),
            &mut self.mode,
            "How `image` enforces policies. The own enforcer always does `dns+nft`.",
        );
        section.key(
            "disable_ipv6",
            Flag,
            &mut self.disable_ipv6,
            "Whether sandboxes with a policy have no IPv6.",
        );
        section.key(
            "otlp_endpoint",
            Maybe(rules::endpoint()),
            &mut self.otlp_endpoint,
            "Where the sidecar sends its metrics.",
        );
        section.key(
            "readiness_timeout_seconds",
            Span::positive_seconds(),
            &mut self.readiness_timeout,
            "How long a sidecar may take to be ready (Docker).",
        );
        section.key("requests", rules::resources(), &mut self.requests, "Resources the sidecar is promised.");
        section.key("limits", rules::resources(), &mut self.limits, "Resources the sidecar cannot exceed: `cpu`, `memory` (own enforcer on Docker: 256Mi unless set), `pids`.");
        section.optional_table(
            "upstream_proxy",
            "A proxy between the sidecar and the world. With `egress.image` it needs `egress.mode = \"dns+nft\"`.",
            &mut self.upstream_proxy,
            UpstreamProxyConfig::default(),
            UpstreamProxyConfig::keys,
        );
    }
}

impl UpstreamProxyConfig {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.required(
            "url",
            Text::that("`http(s)://host[:port]` and nothing else", rules::is_bare_proxy_url)
                .rewritten(|url| url.trim().to_owned()),
            &mut self.url,
            "The proxy.",
        );
        section.key(
            "authorization",
            Maybe(SecretText::line()),
            &mut self.authorization,
            "Whole value of the `Proxy-Authorization` header.",
        );
        section.key(
            "ca_cert_path",
            Maybe(
                Text::that("an absolute path without `:`", rules::is_remote_absolute_path)
                    .rewritten(|path| path.trim().to_owned()),
            ),
            &mut self.ca_cert_path,
            "Further authorities to trust, on the engine's host (Docker).",
        );
        section.key(
            "ca_secret_name",
            Maybe(Text::that("a DNS-1123 subdomain", rules::is_subdomain)),
            &mut self.ca_secret_name,
            "Secret with further authorities to trust (Kubernetes).",
        );
    }
}
