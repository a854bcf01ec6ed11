//! Which addresses a name may lead to. A name is somebody else's: it must not lead into the machine or the network around it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::policy::{Action, Rules};
use crate::settings::PrivateAnswers;

/// Why an address is taken out of an answer: the rule that decided.
pub fn refused(address: IpAddr, rules: &dyn Rules, private: PrivateAnswers) -> Option<String> {
    if parts(address).into_iter().any(never) {
        return Some("names never lead to this machine or link".into());
    }
    match rules.address(address) {
        Some(verdict) if verdict.action == Action::Deny => Some(verdict.rule),
        Some(_) => None,
        None if private == PrivateAnswers::Allowed => None,
        None => parts(address)
            .into_iter()
            .any(is_private)
            .then(|| "names lead to private addresses only if a rule allows the address".into()),
    }
}

/// The address, and the IPv4 address that it carries for a translator or a tunnel.
fn parts(address: IpAddr) -> Vec<IpAddr> {
    let address = address.to_canonical();
    let mut parts = vec![address];
    if let IpAddr::V6(six) = address
        && let Some(four) = carried(six)
    {
        parts.push(four.into());
    }
    parts
}

fn carried(address: Ipv6Addr) -> Option<Ipv4Addr> {
    let bytes = address.octets();
    let four = |at: usize| Ipv4Addr::new(bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]);
    match address.segments() {
        // Translated, with the well-known prefix and with the one for local use.
        [0x64, 0xff9b, 0, 0, 0, 0, _, _] | [0x64, 0xff9b, 1, _, _, _, _, _] => Some(four(12)),
        // 6to4.
        [0x2002, ..] => Some(four(2)),
        // Once meant for automatic tunnels.
        [0, 0, 0, 0, 0, 0, high, _] if high != 0 => Some(four(12)),
        _ => None,
    }
}

fn never(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(four) => {
            let first = four.octets()[0];
            first == 0 || first >= 224 || four.is_loopback() || four.is_link_local()
        }
        IpAddr::V6(six) => {
            six.is_unspecified() || six.is_loopback() || six.is_multicast() || six.is_unicast_link_local()
        }
    }
}

fn is_private(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(four) => {
            let [first, second, ..] = four.octets();
            four.is_private() || (first == 100 && second & 0xc0 == 64)
        }
        // Unique local, and site local, which it replaced.
        IpAddr::V6(six) => six.is_unique_local() || six.segments()[0] & 0xffc0 == 0xfec0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::always::Always;
    use crate::policy::document::Policy;
    use crate::policy::effective::Effective;

    fn rules(text: &str) -> Effective {
        Effective::new(&Always::default(), &Policy::parse(text).unwrap())
    }

    #[test]
    fn the_machine_and_its_link_are_never_led_to() {
        let generous = rules(
            r#"{"defaultAction":"allow","egress":[{"action":"allow","target":"0.0.0.0/0"},{"action":"allow","target":"::/0"}]}"#,
        );
        for text in [
            "127.0.0.1",
            "127.8.8.8",
            "0.0.0.0",
            "0.1.2.3",
            "169.254.169.254",
            "169.254.1.1",
            "224.0.0.1",
            "240.0.0.1",
            "255.255.255.255",
            "::",
            "::1",
            "fe80::1",
            "ff02::1",
            "::ffff:127.0.0.1",
            "64:ff9b::7f00:1",
            "64:ff9b:1::a9fe:a9fe",
            "2002:7f00:1::1",
            "::127.0.0.1",
        ] {
            let told = refused(text.parse().unwrap(), &generous, PrivateAnswers::Allowed);
            assert!(told.is_some(), "{text}");
        }
        assert_eq!(refused("192.0.2.1".parse().unwrap(), &generous, PrivateAnswers::Stripped), None);
        assert_eq!(refused("2001:db8::1".parse().unwrap(), &generous, PrivateAnswers::Stripped), None);
    }

    #[test]
    fn private_addresses_need_a_rule_or_the_setting() {
        let none = rules("{}");
        let some = rules(
            r#"{"egress":[{"action":"allow","target":"10.1.0.0/16"},{"action":"deny","target":"10.1.2.3"}]}"#,
        );
        for text in [
            "10.1.0.1",
            "172.16.0.1",
            "172.31.255.1",
            "192.168.0.1",
            "100.64.0.1",
            "100.127.0.1",
            "fd00::1",
            "fec0::1",
            "64:ff9b::a00:1",
        ] {
            let address = text.parse().unwrap();
            assert!(refused(address, &none, PrivateAnswers::Stripped).is_some(), "{text}");
            assert!(refused(address, &none, PrivateAnswers::Allowed).is_none(), "{text}");
        }
        assert_eq!(refused("172.32.0.1".parse().unwrap(), &none, PrivateAnswers::Stripped), None);
        assert_eq!(refused("10.1.0.1".parse().unwrap(), &some, PrivateAnswers::Stripped), None);
        let denied = refused("10.1.2.3".parse().unwrap(), &some, PrivateAnswers::Allowed);
        assert_eq!(denied.unwrap(), "deny 10.1.2.3");
    }
}
