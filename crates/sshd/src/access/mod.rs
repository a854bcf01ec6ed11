//! Who may sign in, and what they may do then.
//!
//! Every key of a sandbox opens the sandbox; the login name chooses the account. Passwords do not exist here.
//! Invariant: whatever is not understood in a key's options or a certificate's critical options is a refusal.

pub(crate) mod authorized_keys;
pub(crate) mod certificate;

use std::net::IpAddr;
use std::time::SystemTime;

use ipnet::IpNet;
use russh::keys::ssh_key::public::KeyData;
use russh::keys::{Certificate, HashAlg, PublicKey};

use self::authorized_keys::AuthorizedKey;

/// What signing in is decided by.
#[derive(Debug, Clone, Default)]
pub struct Access {
    pub keys: Vec<AuthorizedKey>,
    /// Public keys of those whose user certificates count.
    pub authorities: Vec<PublicKey>,
    /// A principal that every login of this sandbox accepts beside its own name; empty for none.
    pub sandbox: String,
}

/// What a key or certificate allows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grant {
    pub terminal: bool,
    pub forwarding: bool,
    /// Runs instead of whatever is asked for, which it finds in `SSH_ORIGINAL_COMMAND`.
    pub command: Option<String>,
}

impl Grant {
    pub(crate) const EVERYTHING: Grant = Grant { terminal: true, forwarding: true, command: None };
}

/// Why somebody may not sign in. For the log: the peer is told nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no such account")]
    Account,
    #[error("the key is not authorized")]
    Key,
    #[error("the key expired")]
    KeyExpired,
    #[error("the key is not for this source address")]
    Source,
    #[error("the certificate's authority is not trusted")]
    Authority,
    #[error("a host certificate is not for users")]
    NotUser,
    #[error("the certificate is not valid yet, or not any more")]
    Validity,
    #[error("none of the certificate's principals is the login name or the sandbox")]
    Principal,
    #[error("the certificate's critical option \"{0}\" is not known or not valid")]
    CriticalOption(String),
}

impl Access {
    /// Whether a key may be worth a signature. A certificate is offered by its key alone, so with an authority all are.
    pub(crate) fn worth_a_signature(&self, key: &KeyData) -> bool {
        !self.authorities.is_empty() || self.keys.iter().any(|known| known.key.key_data() == key)
    }

    /// The first line with the key that allows it decides.
    pub(crate) fn key(
        &self,
        key: &KeyData,
        now: SystemTime,
        source: Option<IpAddr>,
    ) -> Result<Grant, Refusal> {
        let mut refusal = Refusal::Key;
        for line in self.keys.iter().filter(|line| line.key.key_data() == key) {
            match line.allows(now, source) {
                Ok(grant) => return Ok(grant),
                Err(reason) => refusal = reason,
            }
        }
        Err(refusal)
    }

    pub(crate) fn certificate(
        &self,
        certificate: &Certificate,
        login: &str,
        now: SystemTime,
        source: Option<IpAddr>,
    ) -> Result<Grant, Refusal> {
        certificate::check(self, certificate, login, now, source)
    }
}

/// A key's fingerprint, for the log.
pub(crate) fn fingerprint(key: &KeyData) -> String {
    key.fingerprint(HashAlg::Sha256).to_string()
}

/// An address list as OpenSSH writes it, without its wildcards: addresses and networks, `!` before the excluded.
pub(crate) fn parse_sources(text: &str) -> Option<Vec<(bool, IpNet)>> {
    text.split(',')
        .map(|item| {
            let (included, item) = match item.trim().strip_prefix('!') {
                Some(rest) => (false, rest),
                None => (true, item.trim()),
            };
            let net = item.parse::<IpNet>().ok().or_else(|| Some(IpNet::from(item.parse::<IpAddr>().ok()?)));
            Some((included, net?))
        })
        .collect()
}

/// A peer without an address, as through a Unix socket, matches nothing.
pub(crate) fn source_matches(sources: &[(bool, IpNet)], source: Option<IpAddr>) -> bool {
    let Some(source) = source.map(|address| address.to_canonical()) else { return false };
    let mut matching = sources.iter().filter(|(_, net)| net.contains(&source)).map(|(included, _)| *included);
    let mut found = false;
    matching.all(|included| {
        found = included;
        included
    }) && found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_addresses_and_networks_and_an_exclusion_wins() {
        let sources = parse_sources("10.0.0.0/8,!10.1.0.0/16, ::1").unwrap();
        let allows = |text: &str| source_matches(&sources, Some(text.parse().unwrap()));
        assert!(allows("10.2.3.4") && allows("::1") && allows("::ffff:10.2.3.4"));
        assert!(!allows("10.1.0.9") && !allows("192.0.2.1"));
        assert!(!source_matches(&sources, None));
        assert_eq!(parse_sources("*.example.com"), None);
        assert_eq!(parse_sources("10.0.0.*"), None);
        assert_eq!(parse_sources(""), None);
    }
}
