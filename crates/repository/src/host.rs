//! Host names of repository addresses, and which of them are allowed.

use std::net::{Ipv4Addr, Ipv6Addr};

use crate::error::{Code, SpecError};

/// Bytes of a host name, as in DNS.
const HOST_LIMIT: usize = 253;

/// Checks a host and brings it to lower case: a DNS name, an IPv4 address or an IPv6 address in brackets.
pub(crate) fn normalise_host(host: &str) -> Result<String, &'static str> {
    if let Some(inner) = host.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        let address: Ipv6Addr = inner.parse().map_err(|_| "the host is not an IPv6 address")?;
        return Ok(format!("[{address}]"));
    }
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    if host.is_empty() {
        return Err("the host is missing");
    }
    if host.len() > HOST_LIMIT {
        return Err("the host name is longer than 253 bytes");
    }
    let numeric = host.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    if numeric && host.parse::<Ipv4Addr>().is_err() {
        // Programs read `127.1` and `2130706433` as addresses too; an allow-list would not.
        return Err("the host looks like an address but is not one in dotted form");
    }
    host.split('.').try_for_each(label)?;
    Ok(host)
}

fn label(label: &str) -> Result<(), &'static str> {
    let plain = label.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_');
    if label.is_empty() || label.len() > 63 || !plain || label.starts_with('-') || label.ends_with('-') {
        return Err(
            "the host name has a label that is empty, too long or holds a character that names do not have",
        );
    }
    Ok(())
}

/// One entry of the allow-list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostPattern {
    /// This host alone.
    Exact(String),
    /// `*.example.com`: every name below, not the name itself.
    Below(String),
}

impl HostPattern {
    /// # Errors
    /// The text is neither a host nor `*.` before one.
    pub fn parse(text: &str) -> Result<Self, SpecError> {
        let refuse =
            |message| SpecError::new(Code::HostNotAllowed, format!("the pattern is not usable: {message}"));
        match text.strip_prefix("*.") {
            Some(parent) => normalise_host(parent).map(Self::Below).map_err(refuse),
            None => normalise_host(text).map(Self::Exact).map_err(refuse),
        }
    }

    fn matches(&self, host: &str) -> bool {
        match self {
            Self::Exact(name) => name == host,
            Self::Below(parent) => {
                host.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
        }
    }
}

/// Hosts that repositories may come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HostAllowList {
    /// Every host, also this machine and its private networks; for deployments whose users are trusted with them.
    Any,
    Only(Vec<HostPattern>),
}

impl HostAllowList {
    /// # Errors
    /// One of the patterns is not usable. A lone `*` allows every host.
    pub fn parse<'a>(patterns: impl IntoIterator<Item = &'a str>) -> Result<Self, SpecError> {
        let mut only = Vec::new();
        for pattern in patterns {
            if pattern == "*" {
                return Ok(Self::Any);
            }
            only.push(HostPattern::parse(pattern)?);
        }
        Ok(Self::Only(only))
    }

    /// Whether a host, in lower case, is allowed.
    pub fn allows(&self, host: &str) -> bool {
        match self {
            Self::Any => true,
            Self::Only(patterns) => patterns.iter().any(|pattern| pattern.matches(host)),
        }
    }
}
