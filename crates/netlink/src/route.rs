//! Requests for links, addresses, routes and neighbours, as messages.

use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::message::{ACK, CREATE, DUMP, EXCLUSIVE, Message, REPLACE};

const NEWLINK: u16 = libc::RTM_NEWLINK;
const DELLINK: u16 = libc::RTM_DELLINK;
const NEWADDR: u16 = libc::RTM_NEWADDR;
const NEWROUTE: u16 = libc::RTM_NEWROUTE;
const NEWNEIGH: u16 = libc::RTM_NEWNEIGH;

const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
const VETH_PEER: u16 = 1;
/// `RTNH_F_ONLINK`: the gateway is reachable although no address of ours covers it.
const ONLINK: u32 = 4;

/// An Ethernet address.
pub type Mac = [u8; 6];

/// One end of a veth pair.
#[derive(Clone, Debug)]
pub struct End<'a> {
    pub name: &'a str,
    pub mac: Mac,
}

/// A network namespace other than ours.
#[derive(Clone, Copy, Debug)]
pub enum Namespace<'a> {
    /// That of a process.
    Of(i32),
    /// An open handle of it.
    Open(BorrowedFd<'a>),
}

impl Namespace<'_> {
    fn attribute(self) -> (u16, u32) {
        match self {
            Self::Of(pid) => (libc::IFLA_NET_NS_PID, pid as u32),
            Self::Open(handle) => (libc::IFLA_NET_NS_FD, handle.as_raw_fd() as u32),
        }
    }
}

/// Makes a pair whose far end starts in another namespace.
pub fn add_veth(near: &End<'_>, far: &End<'_>, there: Namespace<'_>, mtu: u32) -> Message {
    let (kind, namespace) = there.attribute();
    let end = |message: Message, end: &End<'_>| {
        message
            .string(libc::IFLA_IFNAME, end.name)
            .native(libc::IFLA_MTU, mtu)
            .native(libc::IFLA_NUM_TX_QUEUES, 1)
            .native(libc::IFLA_NUM_RX_QUEUES, 1)
            .attribute(libc::IFLA_ADDRESS, &end.mac)
    };
    let message = Message::new(NEWLINK, ACK | CREATE | EXCLUSIVE, &link_header(0, 0, 0));
    end(message, near).nest(libc::IFLA_LINKINFO, |info| {
        info.string(INFO_KIND, "veth").nest(INFO_DATA, |data| {
            data.nest(VETH_PEER, |peer| end(peer.raw(&link_header(0, 0, 0)), far).native(kind, namespace))
        })
    })
}

pub fn link_up(index: u32) -> Message {
    let up = libc::IFF_UP as u32;
    Message::new(NEWLINK, ACK, &link_header(index, up, up))
}

pub fn delete_link(name: &str) -> Message {
    Message::new(DELLINK, ACK, &link_header(0, 0, 0)).string(libc::IFLA_IFNAME, name)
}

/// A host address: nothing else is on the link.
pub fn add_address(index: u32, address: Ipv4Addr) -> Message {
    let mut header = vec![libc::AF_INET as u8, 32, 0, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    Message::new(NEWADDR, ACK | CREATE | REPLACE, &header)
        .attribute(libc::IFA_LOCAL, &address.octets())
        .attribute(libc::IFA_ADDRESS, &address.octets())
}

/// A route to one address directly over the link.
pub fn add_host_route(index: u32, to: Ipv4Addr) -> Message {
    Message::new(NEWROUTE, ACK | CREATE | REPLACE, &route_header(32, libc::RT_SCOPE_LINK, 0))
        .attribute(libc::RTA_DST, &to.octets())
        .native(libc::RTA_OIF, index)
}

pub fn add_default_route(index: u32, via: Ipv4Addr) -> Message {
    Message::new(NEWROUTE, ACK | CREATE | REPLACE, &route_header(0, libc::RT_SCOPE_UNIVERSE, ONLINK))
        .attribute(libc::RTA_GATEWAY, &via.octets())
        .native(libc::RTA_OIF, index)
}

/// What is sent from here without an address of its own is sent from `source`.
pub fn add_default_route_from(index: u32, via: Ipv4Addr, source: Ipv4Addr) -> Message {
    add_default_route(index, via).attribute(libc::RTA_PREFSRC, &source.octets())
}

/// Spares the question of who has `address`.
pub fn add_neighbour(index: u32, address: Ipv4Addr, mac: Mac) -> Message {
    let mut header = vec![libc::AF_INET as u8, 0, 0, 0];
    header.extend_from_slice(&index.to_ne_bytes());
    header.extend_from_slice(&libc::NUD_PERMANENT.to_ne_bytes());
    header.extend_from_slice(&[0, 0]);
    Message::new(NEWNEIGH, ACK | CREATE | REPLACE, &header)
        .attribute(libc::NDA_DST, &address.octets())
        .attribute(libc::NDA_LLADDR, &mac)
}

/// All IPv4 addresses of this network namespace.
pub fn dump_addresses() -> Message {
    Message::new(libc::RTM_GETADDR, DUMP, &[libc::AF_INET as u8, 0, 0, 0, 0, 0, 0, 0])
}

/// All IPv4 routes of this network namespace.
pub fn dump_routes() -> Message {
    let mut header = [0; 12];
    header[0] = libc::AF_INET as u8;
    Message::new(libc::RTM_GETROUTE, DUMP, &header)
}

fn link_header(index: u32, flags: u32, mask: u32) -> Vec<u8> {
    let mut header = vec![0; 4];
    header.extend_from_slice(&index.to_ne_bytes());
    header.extend_from_slice(&flags.to_ne_bytes());
    header.extend_from_slice(&mask.to_ne_bytes());
    header
}

fn route_header(prefix_len: u8, scope: u8, flags: u32) -> Vec<u8> {
    let mut header = vec![
        libc::AF_INET as u8,
        prefix_len,
        0,
        0,
        libc::RT_TABLE_MAIN,
        libc::RTPROT_STATIC,
        scope,
        libc::RTN_UNICAST,
    ];
    header.extend_from_slice(&flags.to_ne_bytes());
    header
}
