//! Which receivers may be called: what a tenant names must lead neither to the operator's machines nor to a cloud's metadata.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use reqwest::Url;

/// Characters of an address.
const LONGEST: usize = 2048;

/// Why a receiver is not called.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReceiverError {
    #[error("url is not an address of the form https://host/path")]
    Malformed,
    #[error("url must not hold a user name, a password or a fragment")]
    Credentials,
    #[error(
        "url must be https; http is for receivers on this machine, or for those that the configuration allows"
    )]
    Plain,
    #[error("the address {0} is private; the configuration does not allow it")]
    Private(IpAddr),
}

/// The rules for receivers.
#[derive(Debug, Clone, Default)]
pub struct Receivers {
    /// Whether messages may travel readable.
    pub plain_http: bool,
    /// Addresses that are allowed although they are not public.
    pub private_networks: Vec<IpNet>,
}

impl Receivers {
    /// Checks an address as it is written. What its name leads to is checked with every connection.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn check(&self, text: &str) -> Result<Url, ReceiverError> {
        let url = Url::parse(text).map_err(|_| ReceiverError::Malformed)?;
        let host = url.host_str().filter(|host| !host.is_empty()).ok_or(ReceiverError::Malformed)?;
        if text.len() > LONGEST || !["http", "https"].contains(&url.scheme()) {
            return Err(ReceiverError::Malformed);
        }
        if !url.username().is_empty() || url.password().is_some() || url.fragment().is_some() {
            return Err(ReceiverError::Credentials);
        }
        let literal = host.trim_matches(['[', ']']).parse::<IpAddr>().ok();
        let local = host == "localhost" || literal.is_some_and(|address| address.is_loopback());
        if url.scheme() == "http" && !local && !self.plain_http {
            return Err(ReceiverError::Plain);
        }
        match literal {
            Some(address) if !self.allows(address) => Err(ReceiverError::Private(address)),
            _ => Ok(url),
        }
    }

    /// Whether an address may be connected to.
    pub fn allows(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        is_public(address) || self.private_networks.iter().any(|network| network.contains(&address))
    }
}

fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => is_public_v6(address),
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    let [a, b, c, _] = address.octets();
    let special = address.is_private()
        || address.is_loopback()
        || address.is_link_local()
        || address.is_documentation()
        || a == 0
        || a >= 224
        || (a == 100 && (64..128).contains(&b))
        || (a == 198 && (18..20).contains(&b))
        || (a, b, c) == (192, 0, 0)
        || (a, b, c) == (192, 88, 99);
    !special
}

/// Only what is given out to the public, without what carries an address of version 4.
fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    let global = segments[0] & 0xe000 == 0x2000;
    let special =
        segments[0] == 0x2002 || (segments[0] == 0x2001 && (segments[1] < 0x200 || segments[1] == 0xdb8));
    global && !special
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_public_and_spoken_to_in_private() {
        let strict = Receivers::default();
        for good in ["https://example.org/hook", "https://8.8.8.8:8443/x?y=1", "https://[2606:4700::1111]/"] {
            assert!(strict.check(good).is_ok(), "{good}");
        }
        let refused = |text: &str| strict.check(text).unwrap_err();
        for bad in ["", "x", "ftp://a/", "file:///etc/passwd", "https://", "//a"] {
            assert_eq!(refused(bad), ReceiverError::Malformed, "{bad}");
        }
        for bad in ["https://u@a/", "https://u:p@a/", "https://a/#f"] {
            assert_eq!(refused(bad), ReceiverError::Credentials, "{bad}");
        }
        assert_eq!(refused("http://example.org/"), ReceiverError::Plain);
        assert!(Receivers { plain_http: true, ..strict.clone() }.check("http://example.org/").is_ok());
    }

    #[test]
    fn private_addresses_need_a_permission_however_they_are_written() {
        let strict = Receivers::default();
        for host in [
            "127.0.0.1",
            "2130706433",
            "0x7f.1",
            "0.0.0.0",
            "10.1.2.3",
            "172.16.0.1",
            "192.168.1.1",
            "169.254.169.254",
            "100.64.0.1",
            "192.0.0.1",
            "198.18.0.1",
            "224.0.0.1",
            "255.255.255.255",
            "[::]",
            "[::1]",
            "[fd00::1]",
            "[fe80::1]",
            "[ff02::1]",
            "[::ffff:10.0.0.1]",
            "[64:ff9b::7f00:1]",
            "[2002:7f00:1::]",
            "[2001:db8::1]",
        ] {
            let error = strict.check(&format!("https://{host}/")).unwrap_err();
            assert!(matches!(error, ReceiverError::Private(_)), "{host}: {error}");
        }
        let here = Receivers { private_networks: vec!["127.0.0.0/8".parse().unwrap()], ..strict };
        assert!(here.check("http://127.0.0.1:9000/").is_ok(), "plain, because nobody reads along");
        assert!(here.check("https://[::ffff:127.0.0.1]/").is_ok());
        assert!(here.check("https://10.0.0.1/").is_err());
    }
}
