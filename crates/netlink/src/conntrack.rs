//! The kernel's list of connections: what is open, and ending one.
//!
//! A connection that is ended is only forgotten: its next packet is judged by the rules like that of one which nobody has
//! seen before.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::message::{ACK, DUMP, Message, attributes, family_header, find, number};
use crate::socket::Socket;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_CTNETLINK as u16) << 8;
const GET: u16 = 1;
const DELETE: u16 = 2;

const TUPLE_ORIG: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const STATUS: u16 = 3;
const MARK: u16 = 8;
const MARK_MASK: u16 = 21;
const ID: u16 = 12;
const TUPLE_IP: u16 = 1;
const TUPLE_PROTO: u16 = 2;
const IP_V4_SRC: u16 = 1;
const IP_V4_DST: u16 = 2;
const IP_V6_SRC: u16 = 3;
const IP_V6_DST: u16 = 4;
const PROTO_NUM: u16 = 1;
const PROTO_SRC_PORT: u16 = 2;
const PROTO_DST_PORT: u16 = 3;

/// Source and destination of the packets in one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple {
    /// One of `IPPROTO_*`.
    pub protocol: u8,
    pub source: IpAddr,
    pub destination: IpAddr,
    /// Zero where the protocol has no ports.
    pub source_port: u16,
    pub destination_port: u16,
}

/// A connection that the kernel follows.
#[derive(Clone, Debug)]
pub struct Connection {
    /// As the first packet was sent.
    pub original: Tuple,
    /// As answers come in: differs from the reverse of `original` where addresses are rewritten.
    pub reply: Tuple,
    pub mark: u32,
    pub status: u32,
    key: Vec<u8>,
    id: Option<u32>,
}

/// All connections of the socket's network namespace.
pub fn connections(socket: &mut Socket) -> io::Result<Vec<Connection>> {
    let request = Message::new(SUBSYSTEM | GET, DUMP, &family_header(libc::AF_UNSPEC as u8, 0));
    let answers = socket.dump(request)?;
    Ok(answers.iter().filter_map(|(_, body)| parse(body)).collect())
}

/// Shows every connection of the socket's network namespace whose mark has all of these bits, while they come in; none is
/// held. Connections that come or go meanwhile may be missing or shown twice. The visitor may forget some by another
/// socket; after an error of its no more are shown.
pub fn each_marked(
    socket: &mut Socket,
    bits: u32,
    visit: &mut dyn FnMut(Connection) -> io::Result<()>,
) -> io::Result<()> {
    let request = Message::new(SUBSYSTEM | GET, DUMP, &family_header(libc::AF_UNSPEC as u8, 0));
    let request = request.network(MARK, bits).network(MARK_MASK, bits);
    socket.dump_each(request, &mut |_, body| match parse(body) {
        // Kernels that know no filter show all.
        Some(connection) if connection.mark & bits == bits => visit(connection),
        _ => Ok(()),
    })
}

/// Forgets connections, some hundreds at most at a time; those that are gone already are fine.
pub fn forget<'a>(
    socket: &mut Socket,
    connections: impl IntoIterator<Item = &'a Connection>,
) -> io::Result<()> {
    let mut requests: Vec<Message> = connections.into_iter().map(Connection::deletion).collect();
    let Some(last) = requests.last_mut() else { return Ok(()) };
    last.ask_for_answer();
    socket.transact_but(requests, Some(libc::ENOENT)).map_err(|(_, error)| error)
}

impl Connection {
    fn deletion(&self) -> Message {
        let request = delete(self.original.source, 0).nest(TUPLE_ORIG, |nest| nest.raw(&self.key));
        match self.id {
            // Not another one between the same ends that has come since.
            Some(id) => request.network(ID, id),
            None => request,
        }
    }
}

/// Forgets the TCP or UDP connection whose first packet was sent so; absent is fine.
pub fn forget_tuple(socket: &mut Socket, tuple: &Tuple) -> io::Result<()> {
    let request = delete(tuple.source, ACK).nest(TUPLE_ORIG, |nest| {
        let nest = nest.nest(TUPLE_IP, |ip| match (tuple.source, tuple.destination) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                ip.attribute(IP_V4_SRC, &source.octets()).attribute(IP_V4_DST, &destination.octets())
            }
            (source, destination) => {
                ip.attribute(IP_V6_SRC, &mapped(source)).attribute(IP_V6_DST, &mapped(destination))
            }
        });
        nest.nest(TUPLE_PROTO, |protocol| {
            protocol
                .attribute(PROTO_NUM, &[tuple.protocol])
                .attribute(PROTO_SRC_PORT, &tuple.source_port.to_be_bytes())
                .attribute(PROTO_DST_PORT, &tuple.destination_port.to_be_bytes())
        })
    });
    absent_is_fine(socket.request(request))
}

fn mapped(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

fn delete(source: IpAddr, flags: u16) -> Message {
    let family = if source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    Message::new(SUBSYSTEM | DELETE, flags, &family_header(family as u8, 0))
}

fn absent_is_fine(result: io::Result<()>) -> io::Result<()> {
    match result {
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => Ok(()),
        other => other,
    }
}

fn parse(body: &[u8]) -> Option<Connection> {
    let all = attributes(body, 4);
    let key = find(&all, TUPLE_ORIG)?;
    Some(Connection {
        original: tuple(key)?,
        reply: tuple(find(&all, TUPLE_REPLY)?)?,
        mark: find(&all, MARK).and_then(number).unwrap_or(0),
        status: find(&all, STATUS).and_then(number).unwrap_or(0),
        key: key.to_vec(),
        id: find(&all, ID).and_then(number),
    })
}

fn tuple(nest: &[u8]) -> Option<Tuple> {
    let parts = attributes(nest, 0);
    let ip = attributes(find(&parts, TUPLE_IP)?, 0);
    let protocol = attributes(find(&parts, TUPLE_PROTO)?, 0);
    let address = |v4, v6| {
        let short = find(&ip, v4).and_then(|value| <[u8; 4]>::try_from(value).ok());
        let long = find(&ip, v6).and_then(|value| <[u8; 16]>::try_from(value).ok());
        short
            .map(|octets| IpAddr::V4(Ipv4Addr::from(octets)))
            .or(long.map(|octets| Ipv6Addr::from(octets).into()))
    };
    let port = |kind| {
        let value = find(&protocol, kind).and_then(|value| <[u8; 2]>::try_from(value).ok());
        value.map_or(0, u16::from_be_bytes)
    };
    Some(Tuple {
        protocol: *find(&protocol, PROTO_NUM)?.first()?,
        source: address(IP_V4_SRC, IP_V6_SRC)?,
        destination: address(IP_V4_DST, IP_V6_DST)?,
        source_port: port(PROTO_SRC_PORT),
        destination_port: port(PROTO_DST_PORT),
    })
}
