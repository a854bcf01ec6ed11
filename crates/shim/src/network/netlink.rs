//! A netlink socket and the encoding of messages and attributes.
//!
//! Invariant: every request carries a sequence number, and [`Socket::transact`] returns only when each was
//! acknowledged, so a late answer is never taken for another request's.

use std::io;
use std::os::fd::OwnedFd;

use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SocketAddrNetlink, recv,
    send, socket_with,
};

pub const REQUEST: u16 = libc::NLM_F_REQUEST as u16;
pub const ACK: u16 = libc::NLM_F_ACK as u16;
pub const CREATE: u16 = libc::NLM_F_CREATE as u16;
pub const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
pub const REPLACE: u16 = libc::NLM_F_REPLACE as u16;
pub const APPEND: u16 = libc::NLM_F_APPEND as u16;
pub const DUMP: u16 = libc::NLM_F_DUMP as u16;

const HEADER: usize = 16;
const ERROR: u16 = libc::NLMSG_ERROR as u16;
const DONE: u16 = libc::NLMSG_DONE as u16;
const NESTED: u16 = libc::NLA_F_NESTED as u16;

/// One message under construction.
#[derive(Clone, Debug)]
pub struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// `fixed` is the family's header, such as `ifinfomsg`.
    pub fn new(kind: u16, flags: u16, fixed: &[u8]) -> Self {
        let mut bytes = Vec::with_capacity(256);
        bytes.extend_from_slice(&[0; 4]);
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(flags | REQUEST).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(fixed);
        let mut message = Self { bytes };
        message.pad();
        message
    }

    pub fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = (value.len() + 4) as u16;
        self.bytes.extend_from_slice(&length.to_ne_bytes());
        self.bytes.extend_from_slice(&kind.to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.pad();
        self
    }

    /// A zero-terminated string.
    pub fn string(self, kind: u16, value: &str) -> Self {
        let mut bytes = value.as_bytes().to_vec();
        bytes.push(0);
        self.attribute(kind, &bytes)
    }

    /// A number in the machine's order, as rtnetlink wants.
    pub fn native(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_ne_bytes())
    }

    /// A number in network order, as nfnetlink wants.
    pub fn network(self, kind: u16, value: u32) -> Self {
        self.attribute(kind, &value.to_be_bytes())
    }

    /// An attribute that holds attributes; `fill` may put a fixed header first with [`Message::raw`].
    pub fn nest(mut self, kind: u16, fill: impl FnOnce(Self) -> Self) -> Self {
        let start = self.bytes.len();
        self.bytes.extend_from_slice(&[0; 2]);
        self.bytes.extend_from_slice(&(kind | NESTED).to_ne_bytes());
        let mut filled = fill(self);
        let length = (filled.bytes.len() - start) as u16;
        filled.bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
        filled
    }

    pub fn raw(mut self, bytes: &[u8]) -> Self {
        self.bytes.extend_from_slice(bytes);
        self.pad();
        self
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn wants_answer(&self) -> bool {
        u16::from_ne_bytes([self.bytes[6], self.bytes[7]]) & (ACK | DUMP) != 0
    }

    fn finish(&mut self, sequence: u32) {
        let length = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&length.to_ne_bytes());
        self.bytes[8..12].copy_from_slice(&sequence.to_ne_bytes());
    }
}

/// An answer's type and what follows its header.
pub type Answer = (u16, Vec<u8>);

/// A socket of one netlink family.
#[derive(Debug)]
pub struct Socket {
    fd: OwnedFd,
    sequence: u32,
}

impl Socket {
    pub fn route() -> io::Result<Self> {
        // The protocol number 0.
        Self::open(None)
    }

    pub fn netfilter() -> io::Result<Self> {
        Self::open(Some(rustix::net::netlink::NETFILTER))
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { fd, sequence: 0 })
    }

    /// Sends all messages in one go; the kernel handles them in order. The error is the first one, with the index of
    /// its message; later messages may have been carried out nevertheless.
    pub fn transact(&mut self, mut messages: Vec<Message>) -> Result<(), (usize, io::Error)> {
        let first = self.sequence + 1;
        let mut waiting = 0_usize;
        let mut packet = Vec::new();
        for message in &mut messages {
            self.sequence += 1;
            message.finish(self.sequence);
            waiting += usize::from(message.wants_answer());
            packet.extend_from_slice(&message.bytes);
        }
        send(&self.fd, &packet, SendFlags::empty()).map_err(|error| (0, error.into()))?;
        let mut failed: Option<(usize, io::Error)> = None;
        while waiting > 0 {
            for (kind, sequence, body) in self.receive().map_err(|error| (0, error))? {
                if kind != ERROR || sequence < first {
                    continue;
                }
                waiting = waiting.saturating_sub(1);
                if let Some(error) = error_of(&body) {
                    let index = (sequence - first) as usize;
                    if failed.as_ref().is_none_or(|(earlier, _)| index < *earlier) {
                        failed = Some((index, error));
                    }
                }
            }
            // The end markers of an nfnetlink batch report a failure without having asked for an answer.
            if failed.is_some() {
                break;
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// One request whose only outcome is success or failure.
    pub fn request(&mut self, message: Message) -> io::Result<()> {
        self.transact(vec![message]).map_err(|(_, error)| error)
    }

    /// All objects of a dump request.
    pub fn dump(&mut self, mut message: Message) -> io::Result<Vec<Answer>> {
        self.sequence += 1;
        message.finish(self.sequence);
        send(&self.fd, &message.bytes, SendFlags::empty())?;
        let mut objects = Vec::new();
        loop {
            for (kind, sequence, body) in self.receive()? {
                match kind {
                    _ if sequence != self.sequence => {}
                    DONE => return Ok(objects),
                    ERROR => match error_of(&body) {
                        Some(error) => return Err(error),
                        None => return Ok(objects),
                    },
                    _ => objects.push((kind, body)),
                }
            }
        }
    }

    fn receive(&mut self) -> io::Result<Vec<(u16, u32, Vec<u8>)>> {
        let mut buffer = vec![0; 64 * 1024];
        let (length, _) = recv(&self.fd, &mut buffer[..], RecvFlags::empty())?;
        let mut rest = &buffer[..length];
        let mut messages = Vec::new();
        while rest.len() >= HEADER {
            let size = u32::from_ne_bytes([rest[0], rest[1], rest[2], rest[3]]) as usize;
            if size < HEADER || size > rest.len() {
                break;
            }
            let kind = u16::from_ne_bytes([rest[4], rest[5]]);
            let sequence = u32::from_ne_bytes([rest[8], rest[9], rest[10], rest[11]]);
            messages.push((kind, sequence, rest[HEADER..size].to_vec()));
            rest = &rest[size.next_multiple_of(4).min(rest.len())..];
        }
        Ok(messages)
    }
}

fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(*body.first_chunk::<4>()?);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}

/// The attributes in the body of an answer, behind its fixed header.
pub fn attributes(body: &[u8], fixed: usize) -> Vec<(u16, &[u8])> {
    let mut found = Vec::new();
    let mut rest = body.get(fixed.next_multiple_of(4)..).unwrap_or_default();
    while rest.len() >= 4 {
        let length = u16::from_ne_bytes([rest[0], rest[1]]) as usize;
        if length < 4 || length > rest.len() {
            break;
        }
        let kind = u16::from_ne_bytes([rest[2], rest[3]]) & libc::NLA_TYPE_MASK as u16;
        found.push((kind, &rest[4..length]));
        rest = &rest[length.next_multiple_of(4).min(rest.len())..];
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_padded_and_nests_know_their_length() {
        let mut message = Message::new(16, ACK, &[0; 16]).string(3, "ab").nest(18, |m| m.native(1, 7));
        message.finish(5);
        assert_eq!(message.bytes.len(), 16 + 16 + 8 + 12);
        assert_eq!(&message.bytes[..4], &52_u32.to_ne_bytes());
        let found = attributes(&message.bytes[16..], 16);
        assert_eq!(found[0], (3, &b"ab\0"[..]));
        assert_eq!(found[1].0, 18);
        assert_eq!(attributes(found[1].1, 0), vec![(1, &7_u32.to_ne_bytes()[..])]);
    }

    #[test]
    fn a_torn_answer_does_not_panic() {
        assert!(attributes(&[0, 0, 0, 0, 200, 0, 1, 0], 4).is_empty());
        assert!(attributes(&[], 16).is_empty());
    }
}
