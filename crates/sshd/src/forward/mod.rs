//! Connections carried through a session's connection, and which ones may be.

mod carry;
pub(crate) mod local;
pub(crate) mod remote;

use std::future::Future;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::pin::Pin;

/// Where forwarded ports may lead, in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Forwarding {
    #[default]
    Off,
    /// To and from the sandbox's own loopback addresses.
    LoopbackOnly,
    /// Wherever the sandbox itself may connect and listen.
    Any,
}

impl Forwarding {
    /// Those of a name's addresses that may be connected to.
    pub(crate) fn permits(self, address: &SocketAddr) -> bool {
        match self {
            Forwarding::Off => false,
            Forwarding::LoopbackOnly => address.ip().to_canonical().is_loopback(),
            Forwarding::Any => true,
        }
    }

    /// The addresses to listen on for a host that a peer named, the first that can be had; none when it may not.
    pub(crate) fn listening(self, host: &str) -> Vec<IpAddr> {
        let loopback: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        let everywhere: [IpAddr; 2] = [Ipv6Addr::UNSPECIFIED.into(), Ipv4Addr::UNSPECIFIED.into()];
        let wanted = match host {
            "localhost" => loopback.to_vec(),
            "" | "*" => everywhere.to_vec(),
            "0.0.0.0" => vec![Ipv4Addr::UNSPECIFIED.into()],
            "::" => everywhere.to_vec(),
            literal => literal.parse().into_iter().collect(),
        };
        match self {
            Forwarding::Off => vec![],
            // As OpenSSH without `GatewayPorts`: "everywhere" is narrowed, another address is refused.
            Forwarding::LoopbackOnly if wanted.iter().any(IpAddr::is_unspecified) => loopback.to_vec(),
            Forwarding::LoopbackOnly => wanted.into_iter().filter(IpAddr::is_loopback).collect(),
            Forwarding::Any => wanted,
        }
    }
}

pub type ResolveFuture<'a> = Pin<Box<dyn Future<Output = io::Result<Vec<SocketAddr>>> + Send + 'a>>;

/// How the sandbox turns a name into addresses; a static binary has to bring its own.
pub trait Resolve: Send + Sync + 'static {
    /// Addresses in the order in which they are to be tried. `host` is a name or an address without brackets.
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a>;
}

/// Knows addresses and `localhost`, and nothing else.
#[derive(Debug, Clone, Copy, Default)]
pub struct LiteralNames;

impl Resolve for LiteralNames {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a> {
        let found = literal(host, port).ok_or_else(|| io::ErrorKind::NotFound.into());
        Box::pin(std::future::ready(found))
    }
}

/// Asks the system, which needs a dynamically linked binary or a C library that resolves names by itself.
#[derive(Debug, Clone, Copy, Default)]
pub struct SystemNames;

impl Resolve for SystemNames {
    fn resolve<'a>(&'a self, host: &'a str, port: u16) -> ResolveFuture<'a> {
        Box::pin(async move {
            match literal(host, port) {
                Some(found) => Ok(found),
                None => Ok(tokio::net::lookup_host((host, port)).await?.collect()),
            }
        })
    }
}

fn literal(host: &str, port: u16) -> Option<Vec<SocketAddr>> {
    if host.eq_ignore_ascii_case("localhost") {
        let both: [IpAddr; 2] = [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()];
        return Some(both.map(|ip| SocketAddr::new(ip, port)).to_vec());
    }
    Some(vec![SocketAddr::new(host.parse().ok()?, port)])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_a_connection_may_lead_is_told_by_its_address() {
        let address = |text: &str| text.parse::<SocketAddr>().unwrap();
        for (text, loopback) in [
            ("127.9.9.9:1", true),
            ("[::1]:1", true),
            ("[::ffff:127.0.0.1]:1", true),
            ("0.0.0.0:1", false),
            ("10.0.0.1:1", false),
            ("[::ffff:10.0.0.1]:1", false),
            ("169.254.169.254:1", false),
        ] {
            assert!(!Forwarding::Off.permits(&address(text)), "{text}");
            assert_eq!(Forwarding::LoopbackOnly.permits(&address(text)), loopback, "{text}");
            assert!(Forwarding::Any.permits(&address(text)), "{text}");
        }
    }

    #[test]
    fn listening_everywhere_is_narrowed_or_refused() {
        let on = |policy: Forwarding, host: &str| {
            policy.listening(host).iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        for host in ["", "*", "0.0.0.0", "::", "localhost"] {
            assert_eq!(on(Forwarding::LoopbackOnly, host), "127.0.0.1 ::1", "{host}");
            assert_eq!(on(Forwarding::Off, host), "");
        }
        assert_eq!(on(Forwarding::LoopbackOnly, "127.0.0.5"), "127.0.0.5");
        assert_eq!(on(Forwarding::LoopbackOnly, "10.0.0.1"), "");
        assert_eq!(on(Forwarding::Any, "10.0.0.1"), "10.0.0.1");
        assert_eq!(on(Forwarding::Any, ""), ":: 0.0.0.0");
        assert_eq!(on(Forwarding::Any, "box.example"), "");
    }

    #[tokio::test]
    async fn literal_names_know_no_names() {
        assert_eq!(LiteralNames.resolve("LocalHost", 7).await.unwrap().len(), 2);
        assert!(LiteralNames.resolve("example.com", 7).await.is_err());
    }
}
