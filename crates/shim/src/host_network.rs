//! The host's side of the boxes' network: forwarding, the nftables table, a subnet that nobody uses.
//!
//! Called by the server once at start; each box's own link is the shim's business. All by netlink, no programs.
//! Invariant: [`ensure`] may be called at any time, also while boxes run: the table is replaced atomically.

use std::fs;
use std::io;
use std::net::Ipv4Addr;

use serde::{Deserialize, Serialize};

pub use crate::network::nftables::Limits;

use crate::network::nftables;
use sandglass_netlink::message::attributes;
use sandglass_netlink::route;
use sandglass_netlink::socket::Socket;

/// An IPv4 network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Subnet {
    pub address: Ipv4Addr,
    pub prefix_len: u8,
}

impl Subnet {
    /// Whether some address is in both.
    pub fn overlaps(self, other: Self) -> bool {
        let mask = mask(self.prefix_len.min(other.prefix_len));
        self.address.to_bits() & mask == other.address.to_bits() & mask
    }

    /// Whether `address` is inside.
    pub fn contains(self, address: Ipv4Addr) -> bool {
        self.overlaps(Self { address, prefix_len: 32 })
    }
}

/// Why the host's network could not be set up.
#[derive(Debug, thiserror::Error)]
#[error("cannot {step}: {source}")]
pub struct NetworkError {
    pub step: &'static str,
    #[source]
    pub source: io::Error,
}

/// Turns forwarding on and puts the nftables table named `prefix` in place.
///
/// Boxes (host interfaces starting with `prefix`) may answer the host but not reach it, may not reach each other or
/// link-local addresses, and reach everything else through address translation. Nobody outside reaches them first. Says
/// whether this kernel can keep one box from filling the host's table of connections.
pub fn ensure(prefix: &str, subnet: Subnet) -> Result<Limits, NetworkError> {
    let forward = "/proc/sys/net/ipv4/ip_forward";
    // Writing resets other settings even when nothing changes, so look first.
    if fs::read_to_string(forward).is_ok_and(|value| value.trim() != "1") {
        fs::write(forward, "1").map_err(failed("turn on ip forwarding"))?;
    }
    nftables::install(prefix, (subnet.address, subnet.prefix_len))
        .map_err(failed("install the nftables table"))
}

/// Removes the table; absent is fine. Forwarding stays on, because others may rely on it by now.
pub fn remove(prefix: &str) -> Result<(), NetworkError> {
    nftables::uninstall(prefix).map_err(failed("remove the nftables table"))
}

/// The first candidate that overlaps no address or route of the host.
pub fn pick_free_subnet(candidates: &[Subnet]) -> Result<Option<Subnet>, NetworkError> {
    let taken = taken().map_err(failed("list the host's addresses and routes"))?;
    let free = |candidate: &&Subnet| !taken.iter().any(|other| candidate.overlaps(*other));
    Ok(candidates.iter().find(free).copied())
}

/// Addresses and routes in use. The default route covers everything and therefore does not count.
fn taken() -> io::Result<Vec<Subnet>> {
    let mut netlink = Socket::route()?;
    let mut found = Vec::new();
    for (_, body) in netlink.dump(route::dump_addresses())? {
        let prefix_len = body.get(1).copied().unwrap_or(32);
        found.extend(network_in(&body, 8, libc::IFA_ADDRESS, prefix_len));
        found.extend(network_in(&body, 8, libc::IFA_LOCAL, prefix_len));
    }
    for (_, body) in netlink.dump(route::dump_routes())? {
        let prefix_len = body.get(1).copied().unwrap_or(0);
        if prefix_len > 0 {
            found.extend(network_in(&body, 12, libc::RTA_DST, prefix_len));
        }
    }
    Ok(found)
}

fn network_in(body: &[u8], fixed: usize, wanted: u16, prefix_len: u8) -> Option<Subnet> {
    let (_, value) = attributes(body, fixed).into_iter().find(|(kind, _)| *kind == wanted)?;
    let octets: [u8; 4] = value.try_into().ok()?;
    Some(Subnet { address: octets.into(), prefix_len })
}

fn mask(prefix_len: u8) -> u32 {
    u32::MAX.checked_shl(32 - u32::from(prefix_len.min(32))).unwrap_or(0)
}

fn failed(step: &'static str) -> impl Fn(io::Error) -> NetworkError {
    move |source| NetworkError { step, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn net(text: &str) -> Subnet {
        let (address, len) = text.split_once('/').unwrap();
        Subnet { address: address.parse().unwrap(), prefix_len: len.parse().unwrap() }
    }

    #[test]
    fn overlap_is_decided_by_the_wider_network() {
        assert!(net("10.0.0.0/8").overlaps(net("10.200.0.0/16")));
        assert!(net("10.200.3.4/32").overlaps(net("10.200.0.0/16")));
        assert!(!net("10.201.0.0/16").overlaps(net("10.200.0.0/16")));
        assert!(net("0.0.0.0/0").overlaps(net("10.200.0.0/16")));
    }
}
