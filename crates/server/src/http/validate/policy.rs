//! Whether a network policy can be enforced here, and how its enforcer may be set up.

use sandglass_api::lifecycle::NetworkPolicy;
use sandglass_sandbox::spec::{self, Egress};

use super::{
    environment::{SSL_INSECURE, TRANSPARENT},
    rules::{Network, RuntimeRules},
};
use crate::{
    config::EgressMode,
    http::error::{ApiError, ApiResult},
};

fn refused<T>(why: impl Into<String>) -> ApiResult<T> {
    Err(ApiError::invalid_parameter(why))
}

/// Checks the operator's side of it. An empty policy is a policy.
pub(super) fn check(
    asked: Option<NetworkPolicy>,
    credential_proxy: bool,
    rules: &RuntimeRules,
) -> ApiResult<Option<spec::NetworkPolicy>> {
    let Some(asked) = asked else {
        // Only a policy has an enforcer that could inject anything; the decoder insists on both together.
        return if credential_proxy { refused("credentialProxy needs a networkPolicy") } else { Ok(None) };
    };
    let Some(policies) = rules.policies.as_ref().filter(|_| rules.capabilities.network_policy) else {
        return refused(format!(
            "networkPolicy and credentialProxy are not available on the {} runtime",
            rules.name
        ));
    };
    match &policies.network {
        Network::Bridge => {}
        Network::Host => {
            return refused("networkPolicy needs docker.network_mode = \"bridge\", not \"host\"");
        }
        Network::Named(_) => {
            return refused("networkPolicy needs docker.network_mode = \"bridge\", not a network by name");
        }
    }
    if credential_proxy && policies.has_image && policies.mode != EgressMode::DnsNft {
        return refused(
            "credentialProxy with egress.image needs egress.mode = \"dns+nft\" in the server's configuration",
        );
    }
    if policies.gvisor {
        return refused("networkPolicy cannot be enforced in sandboxes that run on gVisor");
    }
    let egress = asked.egress.into_iter();
    Ok(Some(spec::NetworkPolicy {
        default_action: asked.default_action,
        egress: egress.map(|rule| spec::EgressRule { action: rule.action, target: rule.target }).collect(),
    }))
}

/// Checks the enforcer's own environment against what it is to do.
pub(super) fn check_environment(egress: &Egress, rules: &RuntimeRules) -> ApiResult<()> {
    let value = |name: &str| egress.env.iter().find(|(n, _)| n == name).map_or("", |(_, v)| v.as_str());
    if egress.credential_proxy && !value(SSL_INSECURE).is_empty() {
        return refused(format!("credentialProxy cannot be combined with {SSL_INSECURE}"));
    }
    if !rules.policies.as_ref().is_some_and(|policies| policies.upstream_proxy) {
        return Ok(());
    }
    if !egress.credential_proxy && !truthy(value(TRANSPARENT)) {
        return refused(format!(
            "this server sends sandboxes' traffic through a proxy, so networkPolicy needs credentialProxy or {TRANSPARENT}=true"
        ));
    }
    if truthy(value(SSL_INSECURE)) {
        return refused(format!("{SSL_INSECURE} cannot be combined with this server's upstream proxy"));
    }
    Ok(())
}

/// As the sidecar reads its switches.
fn truthy(text: &str) -> bool {
    ["1", "true", "yes", "y", "on"].contains(&text.trim().to_ascii_lowercase().as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        config::{Config, SecureRuntimeKind, UpstreamProxyConfig},
        http::validate::rules::CreateRules,
    };

    fn empty() -> Option<NetworkPolicy> {
        Some(NetworkPolicy { default_action: None, egress: vec![] })
    }

    #[test]
    fn what_the_operator_must_have_set_up() {
        type Change = fn(&mut Config);
        let cases: &[(Change, bool, bool)] = &[
            (|_| {}, false, true),
            (|c| c.docker.network_mode = "host".into(), false, false),
            (|c| c.docker.network_mode = "mine".into(), false, false),
            (|c| c.egress.image = None, false, true),
            (|c| c.egress.image = None, true, true),
            (|_| {}, true, false),
            (|c| c.egress.mode = EgressMode::DnsNft, true, true),
            (|c| c.secure_runtime.kind = SecureRuntimeKind::Gvisor, false, false),
            (|c| c.secure_runtime.kind = SecureRuntimeKind::Kata, false, true),
        ];
        for (number, (change, credential_proxy, accepted)) in cases.iter().enumerate() {
            let rules = CreateRules::docker(change).runtime;
            assert_eq!(check(empty(), *credential_proxy, &rules).is_ok(), *accepted, "case {number}");
            assert_eq!(check(None, false, &rules).unwrap(), None, "case {number}");
        }
        for credential_proxy in [false, true] {
            assert!(check(empty(), credential_proxy, &CreateRules::embedded().runtime).is_ok());
        }
        let mut none = CreateRules::embedded().runtime;
        none.policies = None;
        assert!(check(empty(), false, &none).is_err());
    }

    #[test]
    fn the_enforcers_environment() {
        let plain = CreateRules::docker(|_| {}).runtime;
        let upstream =
            CreateRules::docker(|c| c.egress.upstream_proxy = Some(UpstreamProxyConfig::default())).runtime;
        for (rules, credential_proxy, env, accepted) in [
            (&plain, false, &[][..], true),
            (&plain, false, &[(SSL_INSECURE, "1")][..], true),
            (&plain, true, &[(SSL_INSECURE, "")][..], true),
            (&plain, true, &[(SSL_INSECURE, "0")][..], false),
            (&upstream, false, &[][..], false),
            (&upstream, false, &[(TRANSPARENT, "off")][..], false),
            (&upstream, false, &[(TRANSPARENT, " TRUE ")][..], true),
            (&upstream, true, &[][..], true),
            (&upstream, false, &[(TRANSPARENT, "y"), (SSL_INSECURE, "0")][..], true),
            (&upstream, false, &[(TRANSPARENT, "y"), (SSL_INSECURE, "on")][..], false),
        ] {
            let owned = env.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect();
            let egress = Egress { policy: spec::NetworkPolicy::default(), credential_proxy, env: owned };
            assert_eq!(check_environment(&egress, rules).is_ok(), accepted, "{credential_proxy} {env:?}");
        }
    }
}
