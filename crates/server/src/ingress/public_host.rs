//! By which name the ports of this machine are reached: from elsewhere, and from the server itself.
//!
//! Deciding is pure; only the functions at the end ask the machine.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use super::endpoints::without_scheme;

/// What is known about where the server runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Whereabouts {
    /// `server.eip`
    pub eip: Option<String>,
    /// `server.host`
    pub listens_on: String,
    pub in_container: bool,
    /// `docker.host_ip`
    pub host_ip: Option<String>,
    /// The machine whose ports are published, when that is not this one.
    pub engine_host: Option<String>,
    /// `docker.publish_host`
    pub publishes_on: Option<Ipv4Addr>,
}

impl Whereabouts {
    /// The host part of endpoint answers. `outward` is asked only when nothing better is known.
    pub fn public(&self, outward: impl FnOnce() -> IpAddr) -> String {
        match self.eip.as_deref().map(bare_host).filter(|host| !host.is_empty()) {
            Some(eip) => bracketed(eip),
            None => self.mapped().map(|host| bracketed(&host)).unwrap_or_else(|| match self.listening() {
                Listening::Everywhere => bracketed(&outward().to_string()),
                Listening::Loopback | Listening::Somewhere => bracketed(self.listens_on.trim()),
            }),
        }
    }

    /// The host by which the server itself reaches published ports.
    pub fn local(&self) -> String {
        // A port that is published on one address answers on no other.
        let published = self.publishes_on.filter(|host| !host.is_unspecified() && !self.in_container);
        self.mapped().or_else(|| published.map(|host| host.to_string())).unwrap_or_else(|| {
            match self.listening() {
                Listening::Everywhere => Ipv4Addr::LOCALHOST.to_string(),
                Listening::Loopback | Listening::Somewhere => self.listens_on.trim().to_owned(),
            }
        })
    }

    /// Where ports are published when not here. In a container neither the wildcard nor loopback leads to the machine whose ports are meant.
    fn mapped(&self) -> Option<String> {
        if let Some(engine) = &self.engine_host {
            return Some(engine.clone());
        }
        let host = self.host_ip.as_deref().map(str::trim).filter(|host| !host.is_empty())?;
        (self.in_container && self.listening() != Listening::Somewhere).then(|| host.to_owned())
    }

    fn listening(&self) -> Listening {
        let host = self.listens_on.trim().trim_start_matches('[').trim_end_matches(']');
        match host.parse::<IpAddr>() {
            _ if host.is_empty() => Listening::Everywhere,
            Ok(address) if address.is_unspecified() => Listening::Everywhere,
            Ok(address) if address.to_canonical().is_loopback() => Listening::Loopback,
            Err(_) if host.eq_ignore_ascii_case("localhost") => Listening::Loopback,
            _ => Listening::Somewhere,
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Listening {
    Everywhere,
    Loopback,
    Somewhere,
}

/// Only the host of what may be a whole base URL, because a port follows.
fn bare_host(eip: &str) -> &str {
    let base = without_scheme(eip);
    let authority = base.split('/').next().unwrap_or(base);
    match authority.rsplit_once(':') {
        // More colons than one are an address of version 6, with a port only behind brackets.
        Some((host, port))
            if port.bytes().all(|b| b.is_ascii_digit()) && (!host.contains(':') || host.ends_with(']')) =>
        {
            host
        }
        _ => authority,
    }
}

fn bracketed(host: &str) -> String {
    if host.parse::<Ipv6Addr>().is_ok() { format!("[{host}]") } else { host.to_owned() }
}

/// The address this machine has towards the rest of the world: the source of its default route.
pub fn routed_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    // Connecting a datagram socket only chooses a route. The address is one that documents use and nobody has.
    socket.connect((Ipv4Addr::new(192, 0, 2, 1), 9)).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_unspecified() && !address.is_loopback()).then_some(address)
}

/// What the machine's own name resolves to, else loopback: for machines without a default route. Blocking.
pub fn named_address() -> IpAddr {
    let named = || {
        let name = rustix::system::uname().nodename().to_str().ok()?.to_owned();
        let mut addresses = (name, 0).to_socket_addrs().ok()?.map(|address| address.ip());
        addresses.find(|address| address.is_ipv4() && !address.is_loopback())
    };
    named().unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST))
}

/// A host as an address that can be connected to; loopback when its name resolves to nothing. Blocking.
pub fn resolve(host: &str) -> IpAddr {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let named = || (bare, 0).to_socket_addrs().ok()?.next().map(|address: SocketAddr| address.ip());
    bare.parse().ok().or_else(named).unwrap_or_else(|| {
        tracing::warn!(host, "the host of published ports cannot be resolved; using loopback");
        IpAddr::V4(Ipv4Addr::LOCALHOST)
    })
}

/// Whether this process runs in a container, by the marks that engines leave.
pub fn in_container() -> bool {
    let named = ["container", "CONTAINER"].into_iter().filter_map(std::env::var_os).any(|value| {
        let known = ["podman", "docker", "oci", "lxc", "lxc-libvirt", "systemd-nspawn"];
        known.into_iter().any(|word| value == word)
    });
    named || ["/.dockerenv", "/run/.containerenv"].into_iter().any(|mark| std::path::Path::new(mark).exists())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_hosts() {
        let outward = IpAddr::from([10, 9, 8, 7]);
        type Case =
            (Option<&'static str>, &'static str, bool, Option<&'static str>, &'static str, &'static str);
        let cases: &[Case] = &[
            // eip, server.host, in a container, docker.host_ip; from elsewhere, from the server
            (Some("203.0.113.7"), "127.0.0.1", false, None, "203.0.113.7", "127.0.0.1"),
            (Some(" https://gw.example:8443/base/ "), "0.0.0.0", false, None, "gw.example", "127.0.0.1"),
            (Some("2001:db8::1"), "0.0.0.0", false, None, "[2001:db8::1]", "127.0.0.1"),
            (Some("[2001:db8::1]:80"), "0.0.0.0", true, Some("h"), "[2001:db8::1]", "h"),
            (
                None,
                "0.0.0.0",
                true,
                Some("host.docker.internal"),
                "host.docker.internal",
                "host.docker.internal",
            ),
            (None, "127.0.0.1", true, Some("1.2.3.4"), "1.2.3.4", "1.2.3.4"),
            (None, "localhost", true, Some("1.2.3.4"), "1.2.3.4", "1.2.3.4"),
            (None, "10.0.0.5", true, Some("1.2.3.4"), "10.0.0.5", "10.0.0.5"),
            (None, "0.0.0.0", false, Some("1.2.3.4"), "10.9.8.7", "127.0.0.1"),
            (None, "0.0.0.0", true, None, "10.9.8.7", "127.0.0.1"),
            (None, "::", false, None, "10.9.8.7", "127.0.0.1"),
            (None, "", false, None, "10.9.8.7", "127.0.0.1"),
            (None, "127.0.0.1", false, None, "127.0.0.1", "127.0.0.1"),
            (None, "::1", false, None, "[::1]", "::1"),
            (None, "box.example", false, None, "box.example", "box.example"),
        ];
        for (eip, listens_on, in_container, host_ip, public, local) in cases {
            let at = Whereabouts {
                eip: eip.map(str::to_owned),
                listens_on: (*listens_on).to_owned(),
                in_container: *in_container,
                host_ip: host_ip.map(str::to_owned),
                publishes_on: Some(Ipv4Addr::UNSPECIFIED),
                engine_host: None,
            };
            assert_eq!(at.public(|| outward), *public, "{at:?}");
            assert_eq!(at.local(), *local, "{at:?}");
        }
    }

    #[test]
    fn another_machines_ports_are_reached_there() {
        let at = |eip: Option<&str>| Whereabouts {
            eip: eip.map(str::to_owned),
            listens_on: "10.0.0.5".to_owned(),
            engine_host: Some("fd00::7".to_owned()),
            ..Whereabouts::default()
        };
        let nowhere = || IpAddr::from([10, 9, 8, 7]);
        assert_eq!(
            (at(None).public(nowhere), at(None).local()),
            ("[fd00::7]".to_owned(), "fd00::7".to_owned())
        );
        assert_eq!(at(Some("gw.example")).public(nowhere), "gw.example");
    }

    #[test]
    fn the_server_goes_where_ports_are_published() {
        let at = |in_container| Whereabouts {
            listens_on: "0.0.0.0".to_owned(),
            in_container,
            publishes_on: Some(Ipv4Addr::new(10, 0, 0, 5)),
            ..Whereabouts::default()
        };
        assert_eq!((at(false).local(), at(true).local()), ("10.0.0.5".to_owned(), "127.0.0.1".to_owned()));
    }

    #[test]
    fn hosts_resolve_or_fall_back() {
        assert_eq!(resolve("[::1]"), IpAddr::from(Ipv6Addr::LOCALHOST));
        assert_eq!(resolve("10.0.0.5"), IpAddr::from([10, 0, 0, 5]));
        assert!(resolve("localhost").is_loopback());
    }
}
