//! The egress policy of a box: what its enforcer is told and may use.
//!
//! The shim places the enforcer and keeps it running; what decides is the policy file in the sandbox directory, which starts as what the
//! create asked for and follows every change made through the enforcer's own API.

use std::{
    io,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use sandglass_sandbox::{
    SandboxId,
    ports::{RuntimeErrorKind, runtime::RuntimeError},
    spec::Egress,
};
use sandglass_shim::spec::{Bind, BoxSpec, EgressLimits, EgressSpec, NetworkSpec};

use super::{Shared, network::Network};
use crate::enforcement::{self, Decided, TOKEN, TRANSPARENT, UpstreamProxy};

/// Where the enforcer finds the authority of the operator's proxy.
const PROXY_AUTHORITY: &str = "/upstream-ca.pem";
/// What the enforcer may see of the host, as far as it is there: the authorities that the host trusts (with what their links lead to), and
/// the rules of the operator that precede every policy.
const SHOWN: [&str; 6] = [
    "/etc/ssl/certs",
    "/etc/pki/ca-trust",
    "/etc/pki/tls/certs",
    "/usr/share/ca-certificates",
    "/usr/local/share/ca-certificates",
    "/var/egress/rules",
];

/// How enforcers are run.
#[derive(Debug, Clone)]
pub struct EgressConfig {
    /// How long one may take to enforce before the create fails.
    pub readiness_timeout: Duration,
    pub otlp_endpoint: Option<String>,
    pub upstream_proxy: Option<UpstreamProxy>,
    /// `None`: 256 MiB, where the host can limit memory.
    pub memory_bytes: Option<u64>,
    /// `None`: unlimited.
    pub cpu_millis: Option<u64>,
}

impl Default for EgressConfig {
    fn default() -> Self {
        Self {
            readiness_timeout: Duration::from_secs(30),
            otlp_endpoint: None,
            upstream_proxy: None,
            memory_bytes: None,
            cpu_millis: None,
        }
    }
}

impl Shared {
    /// What the shim needs for the enforcer of the box in a slot.
    pub(super) fn egress_spec(
        &self,
        id: SandboxId,
        egress: &Egress,
        network: &NetworkSpec,
        slot: u32,
    ) -> Result<EgressSpec, RuntimeError> {
        let config = &self.config.egress;
        let env = environment(config, id, egress, network)
            .map_err(|e| RuntimeError::new(RuntimeErrorKind::Failed, "egress", e.to_string()))?;
        let shown = SHOWN.into_iter().filter(|path| Path::new(path).is_dir());
        let mut views: Vec<Bind> = shown.map(|path| view(path.into(), path)).collect();
        if config.upstream_proxy.as_ref().is_some_and(|proxy| proxy.ca_cert_path.is_some()) {
            views.push(view(proxy_authority(&self.dir(id)), PROXY_AUTHORITY));
        }
        Ok(EgressSpec {
            program: self.binaries.egress.clone(),
            authority: intercepts(&env),
            env,
            user: Network::enforcer(slot),
            ready_within_ms: u64::try_from(config.readiness_timeout.as_millis()).unwrap_or(u64::MAX),
            limits: EgressLimits { cpu_millis: config.cpu_millis, memory_bytes: config.memory_bytes },
            views,
        })
    }

    /// Puts what only root may read where the enforcer can: it runs as somebody else.
    pub(super) fn write_egress_files(&self, dir: &Path, spec: &BoxSpec) -> io::Result<()> {
        let proxy = self.config.egress.upstream_proxy.as_ref();
        let Some(authority) = proxy.and_then(|proxy| proxy.ca_cert_path.as_ref()) else { return Ok(()) };
        if spec.egress.is_none() {
            return Ok(());
        }
        let place = proxy_authority(dir);
        std::fs::create_dir_all(place.parent().unwrap_or(dir))?;
        let content = std::fs::read(authority).map_err(|e| {
            io::Error::new(
                e.kind(),
                format!("egress.upstream_proxy.ca_cert_path {}: {e}", authority.display()),
            )
        })?;
        std::fs::write(&place, content)?;
        std::fs::set_permissions(&place, std::fs::Permissions::from_mode(0o644))
    }
}

/// What opens the enforcer's API, if the box has one.
pub(super) fn token(spec: &BoxSpec) -> Option<String> {
    let env = &spec.egress.as_ref()?.env;
    env.iter().find(|(name, _)| name == TOKEN).map(|(_, value)| value.clone())
}

fn proxy_authority(dir: &Path) -> PathBuf {
    dir.join("egress").join("upstream-ca.pem")
}

fn view(source: PathBuf, target: &str) -> Bind {
    Bind { source, target: target.into(), read_only: true }
}

/// As the enforcer reads the switch.
fn intercepts(env: &[(String, String)]) -> bool {
    let on =
        |value: &str| ["1", "true", "yes", "y", "on"].contains(&value.trim().to_ascii_lowercase().as_str());
    env.iter().any(|(name, value)| name == TRANSPARENT && on(value))
}

fn environment(
    config: &EgressConfig,
    id: SandboxId,
    egress: &Egress,
    network: &NetworkSpec,
) -> serde_json::Result<Vec<(String, String)>> {
    // Only this machine reaches the enforcer's API, and what it sends there does not leave it.
    let trusted = "OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS";
    let mut more = vec![(trusted, "0.0.0.0/0".to_owned())];
    if !network.dns.is_empty() {
        let servers: Vec<String> = network.dns.iter().map(ToString::to_string).collect();
        more.push(("OPENSANDBOX_EGRESS_DNS_UPSTREAM", servers.join(",")));
    }
    let decided = Decided {
        mode: "dns+nft",
        token: &uuid::Uuid::new_v4().simple().to_string(),
        otlp_endpoint: config.otlp_endpoint.as_deref(),
        upstream_proxy: config.upstream_proxy.as_ref(),
        proxy_authority: PROXY_AUTHORITY,
    };
    enforcement::environment(id, egress, decided, more)
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::spec::{EgressRule, NetworkPolicy};

    use super::*;

    fn network() -> NetworkSpec {
        NetworkSpec {
            address: [10, 9, 0, 7].into(),
            gateway: [169, 254, 1, 1].into(),
            host_interface: "sgtest".into(),
            mtu: 1500,
            dns: vec![[192, 0, 2, 53].into(), [192, 0, 2, 54].into()],
            search: vec![],
        }
    }

    fn asked(env: &[(&str, &str)], credential_proxy: bool) -> Egress {
        let rule = EgressRule { action: "allow".into(), target: "example.com".into() };
        Egress {
            policy: NetworkPolicy { default_action: Some("deny".into()), egress: vec![rule] },
            credential_proxy,
            env: env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }

    fn of(config: &EgressConfig, asked: &Egress) -> Vec<(String, String)> {
        environment(config, SandboxId::random(), asked, &network()).unwrap()
    }

    fn get<'a>(env: &'a [(String, String)], name: &str) -> Vec<&'a str> {
        env.iter().filter(|(n, _)| n == name).map(|(_, value)| value.as_str()).collect()
    }

    #[test]
    fn the_enforcer_is_told_the_policy_and_the_request_only_adds() {
        let extra = [("OPENSANDBOX_EGRESS_LOG_LEVEL", "debug"), (TRANSPARENT, "false"), (TOKEN, "mine")];
        let env = of(&EgressConfig::default(), &asked(&extra, true));
        let policy = r#"{"defaultAction":"deny","egress":[{"action":"allow","target":"example.com"}]}"#;
        assert_eq!(get(&env, "OPENSANDBOX_EGRESS_RULES"), [policy]);
        assert_eq!(get(&env, "OPENSANDBOX_EGRESS_DNS_UPSTREAM"), ["192.0.2.53,192.0.2.54"]);
        assert_eq!(get(&env, "OPENSANDBOX_EGRESS_LOG_LEVEL"), ["debug"]);
        assert_eq!(get(&env, TRANSPARENT), ["true"]);
        assert_eq!(get(&env, TOKEN).len(), 1);
        assert_ne!(get(&env, TOKEN), ["mine"]);
        assert!(intercepts(&env));
        assert!(!intercepts(&of(&EgressConfig::default(), &asked(&[(TRANSPARENT, "off")], false))));
        assert!(intercepts(&of(&EgressConfig::default(), &asked(&[(TRANSPARENT, " On ")], false))));
        assert_ne!(
            get(&of(&EgressConfig::default(), &asked(&[], true)), TOKEN),
            get(&of(&EgressConfig::default(), &asked(&[], true)), TOKEN)
        );
    }

    #[test]
    fn an_upstream_proxy_is_passed_on() {
        let proxy = UpstreamProxy {
            url: "http://proxy:3128".into(),
            authorization: Some("Basic x".into()),
            ca_cert_path: Some("/ca.pem".into()),
        };
        let config = EgressConfig {
            upstream_proxy: Some(proxy),
            otlp_endpoint: Some("http://otel".into()),
            ..EgressConfig::default()
        };
        let env = of(&config, &asked(&[], false));
        for (name, value) in [
            ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://otel"),
            ("OPENSANDBOX_EGRESS_UPSTREAM_PROXY", "http://proxy:3128"),
            ("OPENSANDBOX_EGRESS_UPSTREAM_PROXY_AUTH", "Basic x"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_EXTRA_CA", PROXY_AUTHORITY),
        ] {
            assert_eq!(get(&env, name), [value]);
        }
    }
}
