//! Networks as ranges of addresses that neither overlap nor touch, as the kernel's sets want them.

use std::net::IpAddr;

use ipnet::IpNet;
use sandglass_netlink::nft::batch::Element;

use super::rules::Ip;

/// One family's part of `networks`.
pub(super) fn merged<'a>(networks: impl Iterator<Item = &'a IpNet>, family: Ip) -> Vec<Element> {
    let mut spans: Vec<(u128, u128)> = networks
        .filter(|network| matches!(network, IpNet::V4(_)) == (family == Ip::V4))
        .map(|network| (bits(network.network()), bits(network.broadcast())))
        .collect();
    spans.sort_unstable();
    let mut joined: Vec<(u128, u128)> = Vec::new();
    for (first, last) in spans {
        match joined.last_mut() {
            Some((_, end)) if first <= end.saturating_add(1) => *end = (*end).max(last),
            _ => joined.push((first, last)),
        }
    }
    joined
        .iter()
        .map(|(first, last)| Element::Range(address(*first, family), address(*last, family)))
        .collect()
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

fn address(bits: u128, family: Ip) -> IpAddr {
    match family {
        // All of them came from 32 bits.
        Ip::V4 => IpAddr::V4((bits as u32).into()),
        Ip::V6 => IpAddr::V6(bits.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(networks: &[&str], family: Ip) -> Vec<(String, String)> {
        let networks: Vec<IpNet> = networks.iter().map(|text| text.parse().unwrap()).collect();
        merged(networks.iter(), family)
            .into_iter()
            .map(|element| match element {
                Element::Range(first, last) => (first.to_string(), last.to_string()),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn what_overlaps_or_touches_becomes_one_range() {
        let merged = of(&["10.1.0.0/16", "10.0.0.0/8", "11.0.0.0/32", "192.0.2.7/32"], Ip::V4);
        let range = |first: &str, last: &str| (first.to_owned(), last.to_owned());
        assert_eq!(merged, vec![range("10.0.0.0", "11.0.0.0"), range("192.0.2.7", "192.0.2.7")]);
    }

    #[test]
    fn the_last_address_of_all_is_part_of_its_range() {
        let all = ["0.0.0.0/0", "255.255.255.255/32", "::/0"];
        assert_eq!(of(&all, Ip::V4), vec![("0.0.0.0".into(), "255.255.255.255".into())]);
        assert_eq!(of(&all, Ip::V6).len(), 1);
    }
}
