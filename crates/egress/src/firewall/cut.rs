//! Ends connections that the rules do not let through any more.
//!
//! Bounds: the kernel shows connections one after the other, and none but the few hundred that are ended at once are held.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use sandglass_netlink::conntrack;
use sandglass_netlink::nft::batch::{Batch, Element};
use sandglass_netlink::socket::Socket;

use super::kernel::{Firewall, TABLE, named};
use super::rules::{FAMILIES, FOLLOWED, Ip, NAMED, TCP};

/// How long the far end of a connection that was cut cannot take it up again.
const CUT_FOR: Duration = Duration::from_secs(24 * 60 * 60);
/// Connections that are ended at once.
const AT_ONCE: usize = 256;

/// A connection of the box that was let through, or is being inspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Connection {
    /// One of `IPPROTO_*`.
    pub protocol: u8,
    pub address: IpAddr,
    /// Zero where the protocol has no ports.
    pub port: u16,
    pub asked: Asked,
}

/// Which host a connection has asked for, as far as it was inspected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Asked {
    /// It did not say.
    Nothing,
    Host(String),
    /// It said, and nobody remembers what.
    Forgotten,
}

impl Firewall {
    /// Ends connections that may not stay, and says how many. Follows [`Firewall::apply`]; what a gate has taken over is
    /// the gate's to end. The box's next packet is reset; the far end cannot take the connection up again either.
    pub fn cut(&mut self, may_stay: &dyn Fn(&Connection) -> bool) -> io::Result<usize> {
        // One that lists while the other forgets. It is kept: to close it takes until the kernel has thrown the last rules away.
        let mut listing = match self.listing.take() {
            Some(listing) => listing,
            None => Socket::netfilter().map_err(named("open a netlink socket"))?,
        };
        let mut some = Vec::with_capacity(AT_ONCE);
        let mut ended = 0;
        let listed = conntrack::each_marked(&mut listing, FOLLOWED, &mut |followed| {
            let tuple = &followed.original;
            let asked = match self.opened.host(tuple) {
                Some(host) => Asked::Host(host),
                None if followed.mark & NAMED != 0 => Asked::Forgotten,
                None => Asked::Nothing,
            };
            let connection = Connection {
                protocol: tuple.protocol,
                address: tuple.destination,
                port: tuple.destination_port,
                asked,
            };
            if !may_stay(&connection) {
                some.push(followed);
                ended += 1;
            }
            if some.len() == AT_ONCE { self.end(&mut some) } else { Ok(()) }
        });
        listed.map_err(named("list connections"))?;
        self.listing = Some(listing);
        self.end(&mut some)?;
        Ok(ended)
    }

    fn end(&mut self, connections: &mut Vec<conntrack::Connection>) -> io::Result<()> {
        self.keep_out(connections)?;
        conntrack::forget(&mut self.socket, connections.iter()).map_err(named("end connections"))?;
        for connection in connections.drain(..) {
            self.opened.forget(&connection.original);
        }
        Ok(())
    }

    /// The far ends of these connections cannot make new ones out of them.
    fn keep_out(&mut self, connections: &[conntrack::Connection]) -> io::Result<()> {
        for family in FAMILIES {
            let tuples = connections.iter().map(|connection| &connection.original);
            let of_family = tuples
                .filter(|tuple| tuple.protocol == TCP && tuple.destination.is_ipv4() == (family == Ip::V4));
            let ends: Vec<_> = of_family
                .map(|tuple| Element::ExpiringPort(tuple.destination, tuple.destination_port, CUT_FOR))
                .collect();
            let mut batch = Batch::new();
            batch.add_elements(TABLE, &family.cut(), &ends);
            match batch.commit(&mut self.socket) {
                // The set is full: the connections are cut nevertheless.
                Err(error) if error.raw_os_error() == Some(libc::ENFILE) => {}
                other => other.map_err(named("keep connections from coming back"))?,
            }
        }
        Ok(())
    }
}
