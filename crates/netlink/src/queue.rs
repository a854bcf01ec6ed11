//! Packets that wait in the kernel until somebody has decided about them.
//!
//! Invariant: nothing passes by itself. What does not fit into the queue, and everything while nobody has it open, is
//! dropped by the kernel.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use crate::message::{ACK, Message, attributes, family_header, find, number};
use crate::socket::Socket;

const SUBSYSTEM: u16 = (libc::NFNL_SUBSYS_QUEUE as u16) << 8;
const PACKET: u16 = SUBSYSTEM;
const VERDICT: u16 = SUBSYSTEM | 1;
const CONFIG: u16 = SUBSYSTEM | 2;

const CFG_CMD: u16 = 1;
const CFG_PARAMS: u16 = 2;
const CFG_MAXLEN: u16 = 3;
const BIND: u8 = 1;
const COPY_PACKET: u8 = 2;

const PACKET_HDR: u16 = 1;
const VERDICT_HDR: u16 = 2;
const MARK: u16 = 3;
const PAYLOAD: u16 = 10;
const CAP_LEN: u16 = 13;

/// A packet that waits.
#[derive(Clone, Debug)]
pub struct Packet {
    pub id: u32,
    /// One of `NF_INET_*`.
    pub hook: u8,
    pub mark: u32,
    /// From the IP header on; checksums are as they will be on the wire.
    pub payload: Vec<u8>,
    /// Whether `payload` is all of it.
    pub whole: bool,
}

/// What becomes of a packet that waited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It goes on to the next chain of the same hook, with this mark.
    Accept {
        mark: u32,
    },
    Drop,
}

/// An open queue.
#[derive(Debug)]
pub struct Queue {
    socket: Socket,
    number: u16,
}

impl Queue {
    /// Takes over the queue `number` of this network namespace; no more than `length` packets wait in it.
    pub fn open(number: u16, length: u32) -> io::Result<Self> {
        let mut socket = Socket::netfilter()?;
        let config = || Message::new(CONFIG, ACK, &family_header(libc::AF_UNSPEC as u8, number));
        // How many bytes of a packet, then the mode, in a structure without padding. No link has larger packets, and the
        // message still fits into what is read at once.
        let params = [0, 0, 0xf0, 0, COPY_PACKET];
        socket.request(config().attribute(CFG_CMD, &[BIND, 0, 0, 0]))?;
        socket.request(config().attribute(CFG_PARAMS, &params).network(CFG_MAXLEN, length))?;
        socket.listen()?;
        Ok(Self { socket, number })
    }

    /// What waits now; [`io::ErrorKind::WouldBlock`] if nothing does.
    pub fn receive(&mut self) -> io::Result<Vec<Packet>> {
        let messages = self.socket.receive()?;
        Ok(messages
            .iter()
            .filter(|(kind, ..)| *kind == PACKET)
            .filter_map(|(.., body)| parse(body))
            .collect())
    }

    /// Decides about a packet; the kernel has done what follows from it when this returns.
    pub fn decide(&mut self, id: u32, fate: Fate) -> io::Result<()> {
        let (code, mark) = match fate {
            Fate::Accept { mark } => (libc::NF_ACCEPT, Some(mark)),
            Fate::Drop => (libc::NF_DROP, None),
        };
        let mut header = (code as u32).to_be_bytes().to_vec();
        header.extend_from_slice(&id.to_be_bytes());
        let verdict = Message::new(VERDICT, 0, &family_header(libc::AF_UNSPEC as u8, self.number))
            .attribute(VERDICT_HDR, &header);
        self.socket.send(match mark {
            Some(mark) => verdict.network(MARK, mark),
            None => verdict,
        })
    }
}

impl AsRawFd for Queue {
    fn as_raw_fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }
}

fn parse(body: &[u8]) -> Option<Packet> {
    let all = attributes(body, 4);
    let header = find(&all, PACKET_HDR)?;
    let payload = find(&all, PAYLOAD).unwrap_or_default().to_vec();
    // Present only if the packet was longer than what was copied.
    let length = find(&all, CAP_LEN).and_then(number).map_or(payload.len(), |length| length as usize);
    Some(Packet {
        id: number(header)?,
        hook: *header.get(6)?,
        mark: find(&all, MARK).and_then(number).unwrap_or(0),
        whole: length == payload.len(),
        payload,
    })
}
