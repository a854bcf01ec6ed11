//! Which variables go into the sandbox and which to its egress enforcer.

use std::collections::BTreeMap;

use tracing::warn;

use super::rules::RuntimeRules;
use crate::http::error::{ApiError, ApiResult};

/// Environment names that only an egress sidecar reads.
pub(super) const EGRESS_PREFIX: &str = "OPENSANDBOX_EGRESS_";
pub(super) const TRANSPARENT: &str = "OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT";
pub(super) const SSL_INSECURE: &str = "OPENSANDBOX_EGRESS_MITMPROXY_SSL_INSECURE";
const EGRESS_ALLOWED: &[&str] = &[
    "LOG_LEVEL",
    "DNS_UPSTREAM_TIMEOUT",
    "MITMPROXY_SSL_INSECURE",
    "MITMPROXY_TRANSPARENT",
    "MITMPROXY_EXTRA_PORTS",
    "DENY_WEBHOOK",
    "METRICS_EXTRA_ATTRS",
    "CREDENTIAL_VAULT_REQUIRE_TLS",
    "CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH",
    "CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS",
    "POLICY_FILE",
];

/// Whether there is an enforcer, and who decides what it intercepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Enforcer {
    None,
    Policy,
    /// It injects secrets, so it must intercept; what the request says about that does not count.
    CredentialProxy,
}

/// The two environments, sorted by name.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Environments {
    pub(super) sandbox: Vec<(String, String)>,
    pub(super) egress: Vec<(String, String)>,
}

/// Divides what was asked for; a `null` takes a variable of the configuration away.
pub(super) fn divide(
    asked: BTreeMap<String, Option<String>>,
    rules: &RuntimeRules,
    enforcer: Enforcer,
) -> ApiResult<Environments> {
    let base = rules.base_env.iter().map(|(name, value)| (name.clone(), value.expose().to_owned()));
    let mut sandbox: BTreeMap<String, String> = base.collect();
    let mut egress = Vec::new();
    for (name, value) in asked {
        let setting = name.strip_prefix(EGRESS_PREFIX);
        if setting.is_some_and(|setting| !EGRESS_ALLOWED.contains(&setting)) {
            return Err(ApiError::invalid_parameter(format!(
                "env must not contain {EGRESS_PREFIX}… names of this kind"
            )));
        }
        if setting.is_some() && enforcer == Enforcer::None {
            warn!(name, "an egress setting without a network policy is ignored");
            continue;
        }
        let Some(value) = value else {
            sandbox.remove(&name);
            continue;
        };
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return Err(ApiError::invalid_parameter(
                "env names must not be empty or contain '=', and nothing may contain NUL",
            ));
        }
        match setting {
            Some(_) if name == TRANSPARENT && enforcer == Enforcer::CredentialProxy => {}
            Some(_) => {
                if name == TRANSPARENT {
                    sandbox.insert(name.clone(), value.clone());
                }
                egress.push((name, value));
            }
            None => {
                sandbox.insert(name, value);
            }
        }
    }
    if enforcer == Enforcer::CredentialProxy {
        sandbox.insert(TRANSPARENT.to_owned(), "true".to_owned());
    }
    Ok(Environments { sandbox: sandbox.into_iter().collect(), egress })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{config::Secret, http::validate::rules::CreateRules};

    fn run(asked: &[(&str, Option<&str>)], enforcer: Enforcer) -> ApiResult<Environments> {
        let rules = CreateRules::docker(|config| {
            for (name, value) in [("BASE", "1"), ("PROXY", "p")] {
                config.docker.sandbox_env.insert(name.to_owned(), Secret::new(value));
            }
        });
        let asked = asked.iter().map(|(n, v)| ((*n).to_owned(), v.map(str::to_owned))).collect();
        divide(asked, &rules.runtime, enforcer)
    }

    fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        pairs.iter().map(|(n, v)| ((*n).to_owned(), (*v).to_owned())).collect()
    }

    #[test]
    fn the_request_wins_over_the_configuration_and_null_removes() {
        let seen = run(&[("A", Some("x")), ("BASE", None), ("PROXY", Some("mine"))], Enforcer::None).unwrap();
        assert_eq!(seen.sandbox, pairs(&[("A", "x"), ("PROXY", "mine")]));
        assert_eq!(seen.egress, []);
    }

    #[test]
    fn egress_settings_go_to_the_enforcer_only() {
        let asked = [
            ("OPENSANDBOX_EGRESS_LOG_LEVEL", Some("debug")),
            ("OPENSANDBOX_EGRESS_POLICY_FILE", None),
            (TRANSPARENT, Some("on")),
        ];
        let base = [("BASE", "1"), ("PROXY", "p")];
        let without = run(&asked, Enforcer::None).unwrap();
        assert_eq!((without.sandbox, without.egress), (pairs(&base), vec![]));

        let with = run(&asked, Enforcer::Policy).unwrap();
        assert_eq!(with.sandbox, pairs(&[base[0], (TRANSPARENT, "on"), base[1]]));
        assert_eq!(with.egress, pairs(&[("OPENSANDBOX_EGRESS_LOG_LEVEL", "debug"), (TRANSPARENT, "on")]));

        let proxied = run(&asked, Enforcer::CredentialProxy).unwrap();
        assert_eq!(proxied.sandbox, pairs(&[base[0], (TRANSPARENT, "true"), base[1]]));
        assert_eq!(proxied.egress, pairs(&[("OPENSANDBOX_EGRESS_LOG_LEVEL", "debug")]));
    }

    #[test]
    fn what_is_refused() {
        for name in ["OPENSANDBOX_EGRESS_TOKEN", "OPENSANDBOX_EGRESS_", "OPENSANDBOX_EGRESS_RULES", "", "A=B"]
        {
            for enforcer in [Enforcer::None, Enforcer::Policy] {
                let refused = run(&[(name, Some("x"))], enforcer).unwrap_err();
                assert_eq!(refused.code, "SANDBOX::INVALID_PARAMETER", "{name}");
            }
        }
        assert!(run(&[("A", Some("x\0"))], Enforcer::None).is_err());
    }
}
