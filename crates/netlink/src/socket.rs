//! A netlink socket.
//!
//! Invariant: every request carries a sequence number, and [`Socket::transact`] returns only when each that asked for it
//! was acknowledged or one has failed, so a late answer is never taken for another request's.

use std::ffi::c_int;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink::SocketAddrNetlink, recv,
    send, socket_with,
};

use crate::message::{HEADER, Message};

const ERROR: u16 = libc::NLMSG_ERROR as u16;
const DONE: u16 = libc::NLMSG_DONE as u16;

/// What a burst of packets may take in the kernel, if it lets us. Whoever sends must not count on it: in a user namespace
/// the system's limits hold, some 200 KB.
const BUFFER: c_int = 4 << 20;

/// An answer's type and what follows its header.
pub type Answer = (u16, Vec<u8>);

/// A socket of one netlink family, which belongs to the network namespace of the thread that opened it.
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
        let socket = Self::open(Some(rustix::net::netlink::NETFILTER))?;
        // Without the privilege to force it, nobody sends more than the system gives to everybody; bursts may lose more.
        let _ = socket.set(libc::SOL_SOCKET, libc::SO_SNDBUFFORCE, BUFFER);
        if socket.set(libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, BUFFER).is_err() {
            let _ = socket.set(libc::SOL_SOCKET, libc::SO_RCVBUF, BUFFER);
        }
        // Refusals do not repeat the request, which may be longer than what is read at once.
        socket.set(libc::SOL_NETLINK, libc::NETLINK_CAP_ACK, 1)?;
        Ok(socket)
    }

    fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let fd = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        rustix::net::bind(&fd, &SocketAddrNetlink::new(0, 0))?;
        Ok(Self { fd, sequence: 0 })
    }

    /// From here on, reading returns [`io::ErrorKind::WouldBlock`] instead of waiting, and a full buffer loses what
    /// did not fit instead of failing.
    pub(crate) fn listen(&self) -> io::Result<()> {
        self.set(libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, 1)?;
        Ok(rustix::io::ioctl_fionbio(&self.fd, true)?)
    }

    fn set(&self, level: c_int, option: c_int, value: c_int) -> io::Result<()> {
        let size = size_of::<c_int>() as libc::socklen_t;
        // SAFETY: the pointer and the size describe one integer that outlives the call.
        let result =
            unsafe { libc::setsockopt(self.fd.as_raw_fd(), level, option, (&raw const value).cast(), size) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Sends all messages in one go; the kernel handles them in order. The error is the first one, with the index of
    /// its message; later messages may have been carried out nevertheless. Failures are heard of whether or not their
    /// message asks for an answer; the last message has to.
    pub fn transact(&mut self, messages: Vec<Message>) -> Result<(), (usize, io::Error)> {
        self.transact_but(messages, None)
    }

    /// The same; a failure with this number is none.
    pub(crate) fn transact_but(
        &mut self,
        mut messages: Vec<Message>,
        fine: Option<c_int>,
    ) -> Result<(), (usize, io::Error)> {
        let first = self.sequence + 1;
        let mut packet = Vec::with_capacity(messages.iter().map(|message| message.bytes().len()).sum());
        for message in &mut messages {
            self.sequence += 1;
            message.finish(self.sequence);
            packet.extend_from_slice(message.bytes());
        }
        let mut waiting = messages.iter().filter(|message| message.wants_answer()).count();
        retry_on_intr(|| send(&self.fd, &packet, SendFlags::empty())).map_err(|error| (0, error.into()))?;
        let mut failed: Option<(usize, io::Error)> = None;
        while waiting > 0 {
            for (kind, sequence, body) in self.receive().map_err(|error| (0, error))? {
                let Some(index) = sequence.checked_sub(first).filter(|_| kind == ERROR) else { continue };
                let index = index as usize;
                waiting -= usize::from(messages.get(index).is_some_and(Message::wants_answer));
                if let Some(error) = error_of(&body)
                    && error.raw_os_error() != fine
                    && failed.as_ref().is_none_or(|(earlier, _)| index < *earlier)
                {
                    failed = Some((index, error));
                }
            }
            // What did not come about as a whole is not acknowledged as such.
            if failed.is_some() {
                self.drain();
                break;
            }
        }
        failed.map_or(Ok(()), Err)
    }

    /// Throws away answers that nobody waits for, so that they take no room from later ones.
    fn drain(&self) {
        let mut buffer = [0; 64];
        loop {
            match recv(&self.fd, &mut buffer[..], RecvFlags::DONTWAIT) {
                // Some were lost: of those, too, nobody waits for any.
                Ok(_) | Err(Errno::INTR | Errno::NOBUFS) => {}
                Err(_) => return,
            }
        }
    }

    /// One request whose only outcome is success or failure.
    pub fn request(&mut self, message: Message) -> io::Result<()> {
        self.transact(vec![message]).map_err(|(_, error)| error)
    }

    /// One message that nothing is heard about.
    pub(crate) fn send(&mut self, mut message: Message) -> io::Result<()> {
        self.sequence += 1;
        message.finish(self.sequence);
        retry_on_intr(|| send(&self.fd, message.bytes(), SendFlags::empty()))?;
        Ok(())
    }

    /// All objects of a dump request.
    pub fn dump(&mut self, message: Message) -> io::Result<Vec<Answer>> {
        let mut objects = Vec::new();
        self.dump_each(message, &mut |kind, body| {
            objects.push((kind, body.to_vec()));
            Ok(())
        })?;
        Ok(objects)
    }

    /// Shows every object of a dump request, with its type, while they come in; none is held. After an error of `visit`
    /// no more are shown.
    pub fn dump_each(
        &mut self,
        message: Message,
        visit: &mut dyn FnMut(u16, &[u8]) -> io::Result<()>,
    ) -> io::Result<()> {
        self.send(message)?;
        let mut outcome = Ok(());
        loop {
            for (kind, sequence, body) in self.receive()? {
                match kind {
                    _ if sequence != self.sequence => {}
                    DONE => return outcome,
                    ERROR => return error_of(&body).map_or(outcome, Err),
                    // The socket is of no use before the end was read.
                    _ => outcome = outcome.and_then(|()| visit(kind, &body)),
                }
            }
        }
    }

    /// What arrived, as type, sequence number and what follows the header.
    pub(crate) fn receive(&mut self) -> io::Result<Vec<(u16, u32, Vec<u8>)>> {
        let mut buffer = vec![0; 64 * 1024];
        let (length, _) = retry_on_intr(|| recv(&self.fd, &mut buffer[..], RecvFlags::empty()))?;
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

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }
}

fn error_of(body: &[u8]) -> Option<io::Error> {
    let code = i32::from_ne_bytes(*body.first_chunk::<4>()?);
    (code != 0).then(|| io::Error::from_raw_os_error(-code))
}
