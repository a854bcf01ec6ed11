//! A host as clients write it: in a server name, in a `Host` header.

use std::net::{IpAddr, Ipv6Addr};

/// A host that a client asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Host {
    /// Lower case, without a trailing dot.
    Name(String),
    Address(IpAddr),
}

impl Host {
    /// A host without a port; nothing if servers might understand it differently.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        if let Ok(address) = text.parse::<IpAddr>() {
            return Some(Self::Address(address));
        }
        let name = text.strip_suffix('.').unwrap_or(text);
        let labels_fit = name.split('.').all(|label| !label.is_empty() && label.len() <= 63);
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
        if name.len() > 253 || !labels_fit || !name.bytes().all(known) {
            return None;
        }
        // Resolvers and servers read `127.1` and `0x7f.1` as addresses.
        let last = name.rsplit('.').next().unwrap_or_default();
        let numeric = last.bytes().all(|byte| byte.is_ascii_digit())
            || last.strip_prefix("0x").or(last.strip_prefix("0X")).is_some_and(is_hexadecimal);
        (!numeric).then(|| Self::Name(name.to_ascii_lowercase()))
    }

    /// A host with an optional port, as in a `Host` header.
    pub fn parse_authority(text: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(text).ok()?;
        let port_fits = |port: &str| port.len() <= 5 && port.bytes().all(|byte| byte.is_ascii_digit());
        if let Some(rest) = text.strip_prefix('[') {
            let (address, rest) = rest.split_once(']')?;
            let port = if rest.is_empty() { "" } else { rest.strip_prefix(':')? };
            let address: Ipv6Addr = address.parse().ok()?;
            return port_fits(port).then_some(Self::Address(address.into()));
        }
        match text.rsplit_once(':') {
            Some((host, port)) if port_fits(port) && !host.contains(':') => Self::parse(host.as_bytes()),
            Some(_) => None,
            None => Self::parse(text.as_bytes()),
        }
    }
}

fn is_hexadecimal(text: &str) -> bool {
    text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_read_as_servers_read_them() {
        let name = |text: &str| Some(Host::Name(text.to_owned()));
        assert_eq!(Host::parse(b"WWW.Example.com."), name("www.example.com"));
        assert_eq!(Host::parse_authority(b"example.com:8080"), name("example.com"));
        assert_eq!(Host::parse_authority(b"example.com:"), name("example.com"));
        assert_eq!(Host::parse_authority(b"_dmarc.example.com"), name("_dmarc.example.com"));
        let address = |text: &str| Some(Host::Address(text.parse().unwrap()));
        assert_eq!(Host::parse_authority(b"192.0.2.1:80"), address("192.0.2.1"));
        assert_eq!(Host::parse_authority(b"[2001:db8::1]:80"), address("2001:db8::1"));
        assert_eq!(Host::parse(b"2001:db8::1"), address("2001:db8::1"));
    }

    #[test]
    fn what_servers_may_read_differently_is_no_host() {
        for text in [
            "",
            ".",
            "a..b",
            "a.com..",
            "user@a.com",
            "a.com:80:81",
            "a.com:x",
            "a.com ",
            "a.com\0",
            "127.1",
            "0x7f.1",
            "2130706433",
            "0x7f000001",
            "a.com/b",
            "[::1",
            "[::1]x",
            "é.com",
            "2001:db8::1:80:x",
            "a,b",
        ] {
            assert_eq!(Host::parse_authority(text.as_bytes()), None, "{text:?}");
        }
    }
}
