//! Connection settings: which server to talk to, and with which key.
//!
//! Owns the order flag, our own variable, upstream's variable, default. Invariant: the key never reaches any output.

use anyhow::{Result, bail, ensure};
use clap::Args;

/// Where a server started by hand listens.
const DEFAULT_URL: &str = "http://127.0.0.1:8080";

/// The flags that every client command understands.
#[derive(Args, Debug, Clone, Default)]
#[command(next_help_heading = "Connection")]
pub struct Connection {
    /// Address of the server [env: SANDGLASS_URL, or OPEN_SANDBOX_DOMAIN with OPEN_SANDBOX_PROTOCOL] [default: http://127.0.0.1:8080]
    #[arg(long, global = true, value_name = "URL")]
    pub url: Option<String>,
    /// API key [env: SANDGLASS_API_KEY or OPEN_SANDBOX_API_KEY]; prefer the variable, a flag shows in process lists
    #[arg(long, global = true, value_name = "KEY", hide_default_value = true)]
    pub api_key: Option<Secret>,
}

/// A value that must not be printed.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    /// The value itself, for the one header that carries it.
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("***")
    }
}

impl From<String> for Secret {
    fn from(value: String) -> Self {
        Self(value)
    }
}

/// Resolved connection settings.
#[derive(Debug, Clone)]
pub struct Profile {
    base: String,
    key: Option<Secret>,
}

impl Profile {
    /// Resolves flags and variables; `variable` looks a name up in the environment.
    pub fn resolve(flags: &Connection, variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let set = |name: &str| variable(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty());
        let protocol = || set("OPEN_SANDBOX_PROTOCOL").unwrap_or_else(|| "http".to_owned());
        let address = flags
            .url
            .clone()
            .filter(|url| !url.trim().is_empty())
            .or_else(|| set("SANDGLASS_URL"))
            .or_else(|| set("OPEN_SANDBOX_DOMAIN").map(|domain| with_scheme(&domain, &protocol())))
            .unwrap_or_else(|| DEFAULT_URL.to_owned());
        let key = flags
            .api_key
            .clone()
            .or_else(|| set("SANDGLASS_API_KEY").map(Secret))
            .or_else(|| set("OPEN_SANDBOX_API_KEY").map(Secret))
            .filter(|key| !key.0.trim().is_empty());
        Ok(Self { base: base_of(&with_scheme(address.trim(), "http"))?, key })
    }

    /// A profile for a server whose address and key are known, such as the one the demo starts.
    pub fn known(base: &str, key: Option<String>) -> Result<Self> {
        Ok(Self { base: base_of(base)?, key: key.map(Secret) })
    }

    /// `scheme://host[:port][/path]` without a trailing slash and without `/v1`.
    pub fn base(&self) -> &str {
        &self.base
    }

    /// `http` or `https`.
    pub fn scheme(&self) -> &str {
        self.base.split("://").next().unwrap_or("http")
    }

    /// The API key, if one is configured.
    pub fn key(&self) -> Option<&Secret> {
        self.key.as_ref()
    }

    /// Whether the server runs on this machine's loopback, where no proxy must ever get in between.
    pub fn is_loopback(&self) -> bool {
        reqwest::Url::parse(&self.base).is_ok_and(|url| match url.host_str() {
            Some("localhost" | "[::1]") => true,
            Some(host) => host.parse::<std::net::Ipv4Addr>().is_ok_and(|ip| ip.is_loopback()),
            None => false,
        })
    }
}

fn with_scheme(address: &str, protocol: &str) -> String {
    if address.contains("://") { address.to_owned() } else { format!("{protocol}://{address}") }
}

fn base_of(address: &str) -> Result<String> {
    let Ok(url) = reqwest::Url::parse(address) else {
        bail!("the server address is not a URL; write it like {DEFAULT_URL}");
    };
    ensure!(
        matches!(url.scheme(), "http" | "https"),
        "the server address must start with http:// or https://"
    );
    ensure!(url.host_str().is_some_and(|host| !host.is_empty()), "the server address names no host");
    ensure!(
        url.username().is_empty() && url.password().is_none(),
        "the server address must not carry a user name or password; give the key with SANDGLASS_API_KEY"
    );
    ensure!(url.query().is_none() && url.fragment().is_none(), "the server address must not carry a query");
    let text = url.as_str().trim_end_matches('/');
    Ok(text.strip_suffix("/v1").unwrap_or(text).trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(url: Option<&str>, env: &[(&str, &str)]) -> Result<Profile> {
        let flags = Connection { url: url.map(str::to_owned), api_key: None };
        Profile::resolve(&flags, |name| {
            env.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn the_first_source_wins() {
        let env = [
            ("SANDGLASS_URL", "http://ours:1"),
            ("OPEN_SANDBOX_DOMAIN", "theirs:2"),
            ("OPEN_SANDBOX_PROTOCOL", "https"),
        ];
        assert_eq!(resolve(Some("http://flag:3/"), &env).unwrap().base(), "http://flag:3");
        assert_eq!(resolve(None, &env).unwrap().base(), "http://ours:1");
        assert_eq!(resolve(None, &env[1..]).unwrap().base(), "https://theirs:2");
        assert_eq!(resolve(None, &[]).unwrap().base(), DEFAULT_URL);
    }

    #[test]
    fn an_address_may_carry_a_path_and_the_api_version() {
        assert_eq!(resolve(Some("gate.example/api/v1/"), &[]).unwrap().base(), "http://gate.example/api");
        assert_eq!(resolve(Some("http://[::1]:80/v1"), &[]).unwrap().base(), "http://[::1]");
        assert!(resolve(Some("http://[::1]:81"), &[]).unwrap().is_loopback());
        assert!(!resolve(Some("http://10.0.0.1"), &[]).unwrap().is_loopback());
    }

    #[test]
    fn unusable_addresses_are_refused_without_echoing_passwords() {
        for bad in ["ftp://x", "http://", "http://a?b=c"] {
            assert!(resolve(Some(bad), &[]).is_err(), "{bad}");
        }
        let error = resolve(Some("http://me:hunter2@host"), &[]).unwrap_err();
        assert!(!error.to_string().contains("hunter2"));
    }

    #[test]
    fn the_key_is_taken_from_either_variable_and_never_shown() {
        let profile = resolve(None, &[("SANDGLASS_API_KEY", " "), ("OPEN_SANDBOX_API_KEY", "k-1")]).unwrap();
        assert_eq!(profile.key().map(Secret::expose), Some("k-1"));
        assert!(!format!("{profile:?}").contains("k-1"));
    }
}
