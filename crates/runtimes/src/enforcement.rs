//! What an egress enforcer is told in its environment, whichever runtime runs it.

use std::{fmt, path::PathBuf};

use sandglass_sandbox::{SandboxId, spec::Egress};

/// What opens the enforcer's API.
pub(crate) const TOKEN: &str = "OPENSANDBOX_EGRESS_TOKEN";
/// Whether connections are intercepted, so that credentials can be lent.
pub(crate) const TRANSPARENT: &str = "OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT";

/// A proxy that an enforcer sends everything through.
#[derive(Clone)]
pub struct UpstreamProxy {
    pub url: String,
    /// The whole value of `Proxy-Authorization`.
    pub authorization: Option<String>,
    /// A file of the host with the certificate authority to trust.
    pub ca_cert_path: Option<PathBuf>,
}

impl fmt::Debug for UpstreamProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamProxy").field("url", &self.url).finish_non_exhaustive()
    }
}

/// What a runtime decides about an enforcer, beside what the sandbox asks for.
#[derive(Clone, Copy)]
pub(crate) struct Decided<'a> {
    pub mode: &'a str,
    pub token: &'a str,
    pub otlp_endpoint: Option<&'a str>,
    pub upstream_proxy: Option<&'a UpstreamProxy>,
    /// Where the enforcer finds the authority of that proxy.
    pub proxy_authority: &'a str,
}

/// The variables, in order, each once. The sandbox's own only add, and never replace what is decided here or in `more`.
pub(crate) fn environment(
    id: SandboxId,
    egress: &Egress,
    decided: Decided<'_>,
    more: Vec<(&'static str, String)>,
) -> serde_json::Result<Vec<(String, String)>> {
    let mut env: Vec<(&str, String)> = vec![
        ("OPENSANDBOX_EGRESS_RULES", serde_json::to_string(&egress.policy)?),
        ("OPENSANDBOX_EGRESS_MODE", decided.mode.to_owned()),
        (TOKEN, decided.token.to_owned()),
        ("OPENSANDBOX_EGRESS_SANDBOX_ID", id.to_string()),
    ];
    env.extend(more);
    env.extend(decided.otlp_endpoint.map(|url| ("OTEL_EXPORTER_OTLP_ENDPOINT", url.to_owned())));
    if let Some(proxy) = decided.upstream_proxy {
        env.push(("OPENSANDBOX_EGRESS_UPSTREAM_PROXY", proxy.url.clone()));
        let login = proxy.authorization.iter();
        env.extend(login.map(|value| ("OPENSANDBOX_EGRESS_UPSTREAM_PROXY_AUTH", value.clone())));
        if proxy.ca_cert_path.is_some() {
            let authority = decided.proxy_authority.to_owned();
            env.push(("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_EXTRA_CA", authority));
        }
    }
    if egress.credential_proxy {
        env.push((TRANSPARENT, "true".to_owned()));
    }
    let asked = egress.env.iter().filter(|(name, _)| env.iter().all(|(ours, _)| ours != name));
    let asked: Vec<(String, String)> = asked.cloned().collect();
    Ok(env.into_iter().map(|(name, value)| (name.to_owned(), value)).chain(asked).collect())
}
