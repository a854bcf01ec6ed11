//! Networks with the rules that they come from, indexed for look-ups of addresses.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

/// Ranges of addresses that do not overlap, each with the number of the rule that decides about it. A look-up takes as long as
/// a search in a sorted list, however many rules there are.
#[derive(Debug, Default)]
pub(super) struct Spans {
    four: Vec<Span>,
    six: Vec<Span>,
}

#[derive(Debug)]
struct Span {
    first: u128,
    last: u128,
    rule: usize,
}

impl Spans {
    /// Where several networks cover an address, the lowest number counts.
    pub(super) fn new(networks: &[(IpNet, usize)]) -> Self {
        let (four, six): (Vec<_>, Vec<_>) = networks.iter().partition(|(net, _)| matches!(net, IpNet::V4(_)));
        Self { four: spans(&four), six: spans(&six) }
    }

    /// The number of the rule that decides about this address.
    pub(super) fn rule(&self, address: IpAddr) -> Option<usize> {
        let spans = if address.is_ipv4() { &self.four } else { &self.six };
        let wanted = bits(address);
        let before = spans.partition_point(|span| span.last < wanted);
        spans.get(before).filter(|span| span.first <= wanted).map(|span| span.rule)
    }
}

fn spans(networks: &[(IpNet, usize)]) -> Vec<Span> {
    // From the first to the last address, what begins and what ends where; ends come first, so that none is seen twice.
    let mut edges: Vec<(u128, bool, usize)> = Vec::with_capacity(2 * networks.len());
    for (network, rule) in networks {
        edges.push((bits(network.network()), true, *rule));
        // The last address of all has nothing behind it.
        if let Some(behind) = bits(network.broadcast()).checked_add(1) {
            edges.push((behind, false, *rule));
        }
    }
    edges.sort_unstable();
    let mut found: Vec<Span> = Vec::new();
    let mut covering: BTreeSet<usize> = BTreeSet::new();
    let mut since = 0;
    for (at, begins, rule) in edges {
        if at > since
            && let Some(lowest) = covering.first()
        {
            found.push(Span { first: since, last: at - 1, rule: *lowest });
        }
        since = at;
        if begins {
            covering.insert(rule);
        } else {
            covering.remove(&rule);
        }
    }
    if let Some(lowest) = covering.first() {
        found.push(Span { first: since, last: u128::MAX, rule: *lowest });
    }
    found
}

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(address) => u128::from(address.to_bits()),
        IpAddr::V6(address) => address.to_bits(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn everything_and_the_last_address_are_found() {
        let net = |text: &str| -> IpNet { text.parse().unwrap() };
        let spans = Spans::new(&[(net("::/0"), 4), (net("255.255.255.255/32"), 2), (net("ffff::/16"), 1)]);
        let rule = |text: &str| spans.rule(text.parse().unwrap());
        assert_eq!(rule("::"), Some(4));
        assert_eq!(rule("ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"), Some(1));
        assert_eq!(rule("255.255.255.255"), Some(2));
        assert_eq!(rule("255.255.255.254"), None);
    }

    proptest! {
        #[test]
        fn the_index_finds_what_reading_the_list_would(
            networks in prop::collection::vec((0_u32..64, 26_u8..=32), 0..12),
            address in 0_u32..80,
        ) {
            let networks: Vec<(IpNet, usize)> = networks.iter().enumerate().map(|(number, (at, length))| {
                let address = IpAddr::from((0x0a00_0000 + at).to_be_bytes());
                (IpNet::new(address, *length).unwrap().trunc(), number)
            }).collect();
            let address = IpAddr::from((0x0a00_0000 + address).to_be_bytes());
            let by_reading = networks.iter().find(|(network, _)| network.contains(&address)).map(|(_, n)| *n);
            prop_assert_eq!(Spans::new(&networks).rule(address), by_reading);
        }
    }
}
