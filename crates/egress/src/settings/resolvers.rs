//! The resolvers of the system, where none were given.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::firewall::Placement;

/// A local stub of systemd listens in another namespace than a gateway's; this file names the resolvers behind it.
const BEHIND_THE_STUB: &str = "/run/systemd/resolve/resolv.conf";

const MOST: usize = 10;

/// Those of `resolv.conf`, with those in reach of this placement first, and a public one if there are none.
pub(super) fn of_the_system(place: &Placement) -> Vec<SocketAddr> {
    let read = |path: &str| listed(&std::fs::read_to_string(path).unwrap_or_default());
    let mut found = read("/etc/resolv.conf");
    if matches!(place, Placement::Gateway { .. }) {
        found.retain(|address| !address.is_loopback());
        if found.is_empty() {
            found = read(BEHIND_THE_STUB);
            found.retain(|address| !address.is_loopback());
        }
    }
    if found.is_empty() {
        found.push(Ipv4Addr::new(8, 8, 8, 8).into());
    }
    found.into_iter().map(|address| SocketAddr::new(address, 53)).collect()
}

fn listed(text: &str) -> Vec<IpAddr> {
    let servers = text.lines().filter_map(|line| {
        let mut words = line.split_whitespace();
        (words.next() == Some("nameserver")).then(|| words.next()?.parse().ok()).flatten()
    });
    let mut found: Vec<IpAddr> = servers.collect();
    found.sort_by_key(IpAddr::is_loopback);
    found.dedup();
    found.truncate(MOST);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_ones_come_last() {
        let text = "# x\nsearch a.test\nnameserver 127.0.0.53\nnameserver 192.0.2.1\noptions ndots:5\nnameserver fe80::1%eth0\n";
        assert_eq!(listed(text), ["192.0.2.1", "127.0.0.53"].map(|text| text.parse::<IpAddr>().unwrap()));
    }
}
