//! What the process is told by its environment. Read once, at its start; a value that makes no sense is refused, or replaced by its
//! default with a warning where clients rely on that.

mod reading;
mod resolvers;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;
use thiserror::Error;

use crate::firewall::{Doh, Placement};
use crate::vault::Secret;

use reading::Reading;

/// Ports that may be intercepted beside the usual ones.
const MOST_PORTS: usize = 1024;

/// Everything that can be set.
#[derive(Clone, Debug)]
pub struct Settings {
    pub placement: Placement,
    /// The first policy, as it was written.
    pub rules: String,
    /// Read before `rules`, and written at every accepted change.
    pub policy_file: Option<PathBuf>,
    /// Where the files with rules that always apply are.
    pub always_folder: PathBuf,
    pub api: SocketAddr,
    pub token: Option<Secret>,
    /// Most rules that a policy may have; zero is no limit.
    pub max_rules: usize,
    pub sandbox: String,
    pub log_level: Level,
    pub deny_webhook: Option<http::Uri>,
    pub dns: Dns,
    pub doh: Doh,
    pub intercept: Intercept,
    pub vault: VaultSettings,
    /// Whether names may resolve to private addresses that no rule allows.
    pub private_answers: PrivateAnswers,
}

/// How names are resolved.
#[derive(Clone, Debug)]
pub struct Dns {
    pub upstreams: Vec<SocketAddr>,
    pub timeout: Duration,
    /// Name that is asked to see whether a resolver lives.
    pub probe: String,
    pub probe_interval: Duration,
    /// Resolvers that the sandbox may ask without us.
    pub exempt: Vec<IpAddr>,
}

/// TLS interception and what is beyond it.
#[derive(Clone, Debug)]
pub struct Intercept {
    pub tls: Switch,
    pub port: u16,
    /// At most 1,024, beside the usual ones.
    pub extra_ports: Vec<u16>,
    pub trust: PathBuf,
    pub extra_authority: Option<PathBuf>,
    pub verification: Switch,
    pub proxy: Option<String>,
    pub proxy_authorization: Option<Secret>,
    /// Where the authority's certificate is shown to the sandbox.
    pub authority_folder: PathBuf,
}

/// Who may write the vault, and how narrow bindings have to be.
#[derive(Clone, Debug)]
pub struct VaultSettings {
    pub trusted_peers: Vec<IpNet>,
    pub scoped_matches: Switch,
}

/// On or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    On,
    Off,
}

/// What becomes of private addresses in answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrivateAnswers {
    Stripped,
    Allowed,
}

/// Least important lines that are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warn,
    Info,
    Debug,
}

/// A value that the process cannot start with.
#[derive(Debug, Error)]
#[error("{name} is {problem}")]
pub struct Refused {
    pub name: &'static str,
    pub problem: String,
}

impl Settings {
    /// Reads the environment, with warnings about what was replaced by a default.
    pub fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<(Self, Vec<String>), Refused> {
        let mut from = Reading::new(variable);
        let placement = placement(&mut from)?;
        from.mode();
        let settings = Self {
            rules: from.text("OPENSANDBOX_EGRESS_RULES").unwrap_or_default(),
            policy_file: from.text("OPENSANDBOX_EGRESS_POLICY_FILE").map(Into::into),
            always_folder: from.path("SANDGLASS_EGRESS_ALWAYS_DIR", "/var/egress/rules"),
            api: from.listen("OPENSANDBOX_EGRESS_HTTP_ADDR", 18080)?,
            token: from.text("OPENSANDBOX_EGRESS_TOKEN").map(Secret::new),
            max_rules: from.number("OPENSANDBOX_EGRESS_MAX_RULES", 4096, 0..=usize::MAX),
            sandbox: from.text("OPENSANDBOX_EGRESS_SANDBOX_ID").unwrap_or_default(),
            log_level: from.level("OPENSANDBOX_EGRESS_LOG_LEVEL"),
            deny_webhook: from.web_address("OPENSANDBOX_EGRESS_DENY_WEBHOOK"),
            dns: dns(&mut from, &placement)?,
            doh: doh(&mut from)?,
            intercept: intercept(&mut from)?,
            vault: VaultSettings {
                trusted_peers: from.networks("OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS")?,
                scoped_matches: from.switch("OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_REQUIRE_SCOPED_MATCH"),
            },
            private_answers: match from.switch("OPENSANDBOX_EGRESS_ALLOW_PRIVATE_ANSWERS") {
                Switch::On => PrivateAnswers::Allowed,
                Switch::Off => PrivateAnswers::Stripped,
            },
            placement,
        };
        Ok((settings, from.warnings))
    }
}

fn placement(from: &mut Reading<'_>) -> Result<Placement, Refused> {
    const NAME: &str = "SANDGLASS_EGRESS_PLACEMENT";
    match from.text(NAME).as_deref() {
        None | Some("shared") => Ok(Placement::Shared { mark: 1 }),
        Some("gateway") => Ok(Placement::Gateway {
            down: from.text("SANDGLASS_EGRESS_DOWN").unwrap_or_else(|| "down".into()),
            up: from.text("SANDGLASS_EGRESS_UP").unwrap_or_else(|| "up".into()),
            own: from.address("SANDGLASS_EGRESS_OWN", Some(Ipv4Addr::new(169, 254, 1, 3)))?,
            boxed: from.address("SANDGLASS_EGRESS_BOX", None)?,
        }),
        Some(other) => Err(Refused { name: NAME, problem: format!("{other:?} (use gateway or shared)") }),
    }
}

fn dns(from: &mut Reading<'_>, place: &Placement) -> Result<Dns, Refused> {
    let upstreams = match from.resolvers("OPENSANDBOX_EGRESS_DNS_UPSTREAM")? {
        given if !given.is_empty() => given,
        _ => resolvers::of_the_system(place),
    };
    Ok(Dns {
        upstreams,
        timeout: from.seconds("OPENSANDBOX_EGRESS_DNS_UPSTREAM_TIMEOUT", 5, 1..=120),
        probe: from.text("OPENSANDBOX_EGRESS_DNS_UPSTREAM_PROBE").unwrap_or_else(|| ".".into()),
        probe_interval: from.seconds("OPENSANDBOX_EGRESS_DNS_UPSTREAM_PROBE_INTERVAL_SEC", 30, 1..=3600),
        exempt: from.addresses("OPENSANDBOX_EGRESS_NAMESERVER_EXEMPT"),
    })
}

fn doh(from: &mut Reading<'_>) -> Result<Doh, Refused> {
    let listed = from.networks("OPENSANDBOX_EGRESS_DOH_BLOCKLIST")?;
    Ok(match from.switch("OPENSANDBOX_EGRESS_BLOCK_DOH_443") {
        Switch::Off => Doh::Pass,
        Switch::On if listed.is_empty() => Doh::RefuseEverywhere,
        Switch::On => Doh::Refuse(listed),
    })
}

fn intercept(from: &mut Reading<'_>) -> Result<Intercept, Refused> {
    Ok(Intercept {
        tls: from.switch("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT"),
        port: from.number("OPENSANDBOX_EGRESS_MITMPROXY_PORT", 18081, 1..=u16::MAX),
        extra_ports: from.ports("OPENSANDBOX_EGRESS_MITMPROXY_EXTRA_PORTS", MOST_PORTS)?,
        trust: from.path("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_TRUST_DIR", "/etc/ssl/certs"),
        extra_authority: from.text("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_EXTRA_CA").map(Into::into),
        verification: match from.switch("OPENSANDBOX_EGRESS_MITMPROXY_SSL_INSECURE") {
            Switch::On => Switch::Off,
            Switch::Off => Switch::On,
        },
        proxy: from.text("OPENSANDBOX_EGRESS_UPSTREAM_PROXY"),
        proxy_authorization: from.text("OPENSANDBOX_EGRESS_UPSTREAM_PROXY_AUTH").map(Secret::new),
        authority_folder: from.path("SANDGLASS_EGRESS_CA_DIR", "/opt/opensandbox"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(pairs: &[(&str, &str)]) -> Result<(Settings, Vec<String>), Refused> {
        let own: Vec<_> = pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        Settings::read(&move |name| own.iter().find(|(key, _)| key == name).map(|(_, value)| value.clone()))
    }

    #[test]
    fn without_anything_the_defaults_hold() {
        let (settings, warnings) = read(&[]).unwrap();
        assert_eq!(settings.placement, Placement::Shared { mark: 1 });
        assert_eq!(settings.api, "[::]:18080".parse().unwrap());
        assert_eq!(settings.max_rules, 4096);
        assert_eq!(settings.dns.timeout, Duration::from_secs(5));
        assert_eq!(settings.intercept.tls, Switch::Off);
        assert_eq!(settings.intercept.verification, Switch::On);
        assert_eq!(settings.doh, Doh::Pass);
        assert!(settings.token.is_none() && warnings.is_empty() && !settings.dns.upstreams.is_empty());
    }

    #[test]
    fn odd_values_become_defaults_with_a_warning() {
        for (name, value) in [
            ("OPENSANDBOX_EGRESS_MODE", "nft"),
            ("OPENSANDBOX_EGRESS_MAX_RULES", "-1"),
            ("OPENSANDBOX_EGRESS_LOG_LEVEL", "loud"),
            ("OPENSANDBOX_EGRESS_DNS_UPSTREAM_TIMEOUT", "121"),
            ("OPENSANDBOX_EGRESS_DNS_UPSTREAM_PROBE_INTERVAL_SEC", "0"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_PORT", "70000"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_EXTRA_PORTS", "8443,x"),
            ("OPENSANDBOX_EGRESS_DENY_WEBHOOK", "ftp://x"),
            ("OPENSANDBOX_EGRESS_NAMESERVER_EXEMPT", "192.0.2.1,dns.test"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "perhaps"),
        ] {
            let (_, warnings) = read(&[(name, value)]).unwrap();
            assert_eq!(warnings.len(), 1, "{name}");
            assert!(warnings[0].contains(name), "{warnings:?}");
        }
        assert!(read(&[("OPENSANDBOX_EGRESS_MODE", "dns+nft")]).unwrap().1.is_empty());
    }

    #[test]
    fn what_would_weaken_it_is_refused() {
        for (name, value) in [
            ("OPENSANDBOX_EGRESS_DNS_UPSTREAM", "dns.test"),
            ("OPENSANDBOX_EGRESS_DOH_BLOCKLIST", "dns.test"),
            ("OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS", "all"),
            ("OPENSANDBOX_EGRESS_HTTP_ADDR", "nowhere"),
            ("SANDGLASS_EGRESS_PLACEMENT", "elsewhere"),
        ] {
            assert_eq!(read(&[(name, value)]).unwrap_err().name, name);
        }
        assert_eq!(
            read(&[("SANDGLASS_EGRESS_PLACEMENT", "gateway")]).unwrap_err().name,
            "SANDGLASS_EGRESS_BOX"
        );
    }

    #[test]
    fn ports_are_counted_once_and_bounded() {
        let ports =
            |last: u16| (1..=last).chain(1..9).map(|port| port.to_string()).collect::<Vec<_>>().join(",");
        let name = "OPENSANDBOX_EGRESS_MITMPROXY_EXTRA_PORTS";
        assert_eq!(read(&[(name, &ports(1024))]).unwrap().0.intercept.extra_ports.len(), MOST_PORTS);
        let refused = read(&[(name, &ports(1025))]).unwrap_err();
        assert_eq!(
            (refused.name, refused.problem.as_str()),
            (name, "a list of 1025 ports (name 1024 at most)")
        );
    }

    #[test]
    fn values_are_read() {
        let (settings, warnings) = read(&[
            ("SANDGLASS_EGRESS_PLACEMENT", "gateway"),
            ("SANDGLASS_EGRESS_BOX", "192.0.2.9"),
            ("OPENSANDBOX_EGRESS_DNS_UPSTREAM", "192.0.2.53, 192.0.2.54:5353,[2001:db8::1]:53,2001:db8::2"),
            ("OPENSANDBOX_EGRESS_HTTP_ADDR", "127.0.0.1:1234"),
            ("OPENSANDBOX_EGRESS_TOKEN", "hush"),
            ("OPENSANDBOX_EGRESS_BLOCK_DOH_443", "yes"),
            ("OPENSANDBOX_EGRESS_DOH_BLOCKLIST", "192.0.2.1,198.51.100.0/24"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT", "ON"),
            ("OPENSANDBOX_EGRESS_MITMPROXY_EXTRA_PORTS", "8443, 9443"),
        ])
        .unwrap();
        assert!(warnings.is_empty(), "{warnings:?}");
        assert_eq!(settings.dns.upstreams.len(), 4);
        assert_eq!(settings.dns.upstreams[0], "192.0.2.53:53".parse().unwrap());
        assert_eq!(settings.dns.upstreams[3], "[2001:db8::2]:53".parse().unwrap());
        assert_eq!(settings.api, "127.0.0.1:1234".parse().unwrap());
        assert!(!format!("{settings:?}").contains("hush"));
        assert!(matches!(settings.doh, Doh::Refuse(ref list) if list.len() == 2));
        assert_eq!(settings.intercept.extra_ports, [8443, 9443]);
    }
}
