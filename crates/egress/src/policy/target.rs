//! What a rule is about: a network, or names.

use std::net::IpAddr;

use hickory_proto::rr::Name;
use ipnet::{IpNet, Ipv4Net};

/// What a rule's target text means.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    Network(IpNet),
    /// This name and no other.
    Exact(String),
    /// Every name below this one, at any depth, and not this one itself.
    Below(String),
    /// A text that matches no name, like one with an asterisk in the middle. Accepted because clients send such things and expect
    /// them to be shown again.
    Nothing,
}

impl Target {
    /// Reads a text as an address, else as a network, else as a pattern for names.
    pub fn read(text: &str) -> Self {
        let text = text.trim();
        if let Ok(address) = text.parse::<IpAddr>() {
            return Self::Network(plain(address.into()));
        }
        if let Ok(network) = text.parse::<IpNet>() {
            return Self::Network(plain(network.trunc()));
        }
        let (below, name) = match text.strip_prefix("*.") {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        match host_name(name) {
            Some(name) if below && !name.is_empty() => Self::Below(name),
            Some(name) if !below => Self::Exact(name),
            _ => Self::Nothing,
        }
    }

    /// Whether it is about this name: lower case, without a trailing dot.
    pub fn covers_name(&self, name: &str) -> bool {
        match self {
            Self::Exact(own) => own == name,
            Self::Below(parent) => {
                name.strip_suffix(parent.as_str()).is_some_and(|rest| rest.len() > 1 && rest.ends_with('.'))
            }
            Self::Network(_) | Self::Nothing => false,
        }
    }
}

/// An IPv4 network written as IPv6 is the IPv4 network: the kernel sees packets of that family only.
fn plain(network: IpNet) -> IpNet {
    if let IpNet::V6(six) = network
        && let Some(four) = six.network().to_ipv4_mapped()
        && six.prefix_len() >= 96
    {
        let length = six.prefix_len() - 96;
        return Ipv4Net::new(four, length).unwrap_or_else(|_| four.into()).into();
    }
    network
}

/// The form in which names are compared: lower case, no trailing dot, other scripts in their ASCII form.
fn host_name(text: &str) -> Option<String> {
    if text.contains('*') {
        return None;
    }
    let text = text.strip_suffix('.').unwrap_or(text);
    if text.is_ascii() {
        return Some(text.to_ascii_lowercase());
    }
    let name = Name::from_utf8(text).ok()?.to_ascii();
    Some(name.trim_end_matches('.').to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_addresses_then_networks_then_names() {
        let network = |text: &str| Target::Network(text.parse().unwrap());
        for (text, expected) in [
            ("192.0.2.1", network("192.0.2.1/32")),
            (" 192.0.2.7/24 ", network("192.0.2.0/24")),
            ("2001:db8::1", network("2001:db8::1/128")),
            ("2001:db8::/32", network("2001:db8::/32")),
            ("::ffff:10.1.2.3", network("10.1.2.3/32")),
            ("::ffff:10.0.0.0/104", network("10.0.0.0/8")),
            ("Example.COM.", Target::Exact("example.com".into())),
            ("*.Example.com", Target::Below("example.com".into())),
            ("bücher.example", Target::Exact("xn--bcher-kva.example".into())),
            ("*.bücher.example", Target::Below("xn--bcher-kva.example".into())),
            ("*", Target::Nothing),
            ("*.", Target::Nothing),
            ("a.*.example", Target::Nothing),
            ("*.*.example", Target::Nothing),
            ("*example.com", Target::Nothing),
            ("192.0.2.1:443", Target::Exact("192.0.2.1:443".into())),
        ] {
            assert_eq!(Target::read(text), expected, "{text}");
        }
    }

    #[test]
    fn a_wildcard_covers_every_depth_below_and_not_the_apex() {
        let target = Target::read("*.example.com");
        assert!(target.covers_name("a.example.com"));
        assert!(target.covers_name("a.b.c.example.com"));
        assert!(!target.covers_name("example.com"));
        assert!(!target.covers_name(".example.com"));
        assert!(!target.covers_name("badexample.com"));
        assert!(!target.covers_name("example.com.evil.test"));
    }
}
