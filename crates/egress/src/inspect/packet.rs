//! Packets as they lie in the kernel: addresses, ports, and what of TCP matters here.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use sandglass_netlink::conntrack::Tuple;

pub const FIN: u8 = 0x01;
pub const SYN: u8 = 0x02;
pub const RST: u8 = 0x04;
pub const ACK: u8 = 0x10;
pub const URG: u8 = 0x20;

/// The TCP option of connections over several ways at once (RFC 8684).
pub const MULTIPATH: u8 = 30;

const TCP: u8 = libc::IPPROTO_TCP as u8;
const UDP: u8 = libc::IPPROTO_UDP as u8;

/// A packet's headers; of TCP also what it carries.
#[derive(Clone, Debug)]
pub struct Packet<'a> {
    pub tuple: Tuple,
    /// Absent in other protocols, and where the header is torn.
    pub tcp: Option<Segment<'a>>,
}

/// A TCP segment.
#[derive(Clone, Copy, Debug)]
pub struct Segment<'a> {
    pub sequence: u32,
    pub acknowledged: u32,
    pub flags: u8,
    /// Between the fixed header and what it carries.
    pub options: &'a [u8],
    pub bytes: &'a [u8],
}

impl Segment<'_> {
    /// Whether it has an option of this kind, also behind the one that ends the list.
    pub fn has_option(&self, kind: u8) -> bool {
        let mut rest = self.options;
        while let [first, behind @ ..] = rest {
            // The end of the list and the filler are one byte long.
            let length = if *first < 2 { 1 } else { usize::from(behind.first().copied().unwrap_or(0)) };
            if *first == kind {
                return true;
            }
            match rest.get(length.max(1)..) {
                Some(next) => rest = next,
                None => return false,
            }
        }
        false
    }
}

impl<'a> Packet<'a> {
    /// Nothing if it is no IP packet, or one that is not followed here: a fragment, extension headers before TCP.
    pub fn parse(bytes: &'a [u8]) -> Option<Self> {
        let (protocol, source, destination, rest) = match bytes.first()? >> 4 {
            4 => ipv4(bytes)?,
            6 => ipv6(bytes)?,
            _ => return None,
        };
        let port = |at: usize| match protocol {
            TCP | UDP => rest.get(at..at + 2).map_or(0, |two| u16::from_be_bytes([two[0], two[1]])),
            _ => 0,
        };
        let (source_port, destination_port) = (port(0), port(2));
        let tuple = Tuple { protocol, source, destination, source_port, destination_port };
        Some(Self { tuple, tcp: if protocol == TCP { segment(rest) } else { None } })
    }

    /// Whether the receiver would take it: the checksum over a whole TCP packet.
    pub fn is_intact(bytes: &[u8]) -> bool {
        let Some((protocol, source, destination, rest)) =
            bytes.first().and_then(|first| if first >> 4 == 4 { ipv4(bytes) } else { ipv6(bytes) })
        else {
            return false;
        };
        let mut sum = u64::from(protocol) + rest.len() as u64;
        let mut add = |bytes: &[u8]| {
            for pair in bytes.chunks(2) {
                sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
            }
        };
        for address in [source, destination] {
            match address {
                IpAddr::V4(address) => add(&address.octets()),
                IpAddr::V6(address) => add(&address.octets()),
            }
        }
        add(rest);
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        sum == 0xffff
    }
}

type Parts<'a> = (u8, IpAddr, IpAddr, &'a [u8]);

fn ipv4(bytes: &[u8]) -> Option<Parts<'_>> {
    let header = usize::from(bytes.first()? & 0xf) * 4;
    let fixed = bytes.first_chunk::<20>()?;
    let fragment = u16::from_be_bytes([fixed[6], fixed[7]]) & 0x3fff;
    if header < 20 || fragment != 0 {
        return None;
    }
    // A copy of the first bytes only may end before the packet does.
    let length = usize::from(u16::from_be_bytes([fixed[2], fixed[3]])).min(bytes.len());
    let address = |at: usize| Ipv4Addr::new(fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]).into();
    Some((fixed[9], address(12), address(16), bytes.get(header..length)?))
}

fn ipv6(bytes: &[u8]) -> Option<Parts<'_>> {
    let fixed = bytes.first_chunk::<40>()?;
    let length = (usize::from(u16::from_be_bytes([fixed[4], fixed[5]])) + 40).min(bytes.len());
    let address = |at: usize| {
        let octets: Option<[u8; 16]> = fixed[at..at + 16].try_into().ok();
        octets.map(|octets| IpAddr::V6(Ipv6Addr::from(octets)))
    };
    Some((fixed[6], address(8)?, address(24)?, bytes.get(40..length)?))
}

fn segment(bytes: &[u8]) -> Option<Segment<'_>> {
    let fixed = bytes.first_chunk::<20>()?;
    let header = usize::from(fixed[12] >> 4) * 4;
    let number = |at: usize| u32::from_be_bytes([fixed[at], fixed[at + 1], fixed[at + 2], fixed[at + 3]]);
    if header < 20 {
        return None;
    }
    Some(Segment {
        sequence: number(4),
        acknowledged: number(8),
        flags: fixed[13],
        options: bytes.get(20..header)?,
        bytes: bytes.get(header..)?,
    })
}
