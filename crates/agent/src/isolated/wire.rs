//! Messages with descriptors between the agent and a session, over a socket that keeps their borders.
//!
//! Invariant: a message that is too long or not understood is dropped with its descriptors; neither side trusts the
//! other's lengths.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Ids and numbers only; code and output travel through descriptors.
const MAX_MESSAGE: usize = 4096;

/// How a run is executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum How {
    /// In the session's shell itself: what it changes stays.
    Shell,
    /// In a copy of the shell, which takes its changes along.
    Copy,
    /// In a copy that nobody waits for.
    Background,
}

/// From the agent to the session.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// With the script's descriptor.
    Run { id: String, how: How },
    /// Ends a foreground run: asked first, then by force.
    Stop { id: String },
}

/// From the session to the agent.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Report {
    Ready,
    Failed {
        reason: String,
    },
    /// With the reading end of the run's output.
    Output {
        id: String,
    },
    /// A background run has been started, the shell is free again.
    Away {
        id: String,
    },
    Ended {
        id: String,
        code: i32,
        reason: Option<String>,
    },
    /// There is no shell any more.
    Over {
        reason: String,
    },
}

/// Comes with a socket on which the holder is to answer requests.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Connection {}

/// Tokio knows streams and datagrams only; of the stream, nothing but its readiness is used.
pub(super) struct Channel(UnixStream);

impl Channel {
    pub(super) fn new(fd: OwnedFd) -> io::Result<Self> {
        let socket = std::os::unix::net::UnixStream::from(fd);
        socket.set_nonblocking(true)?;
        Ok(Channel(UnixStream::from_std(socket)?))
    }

    pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
        Ok(socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
    }

    pub(super) async fn send(&self, message: &impl Serialize, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let text = serde_json::to_vec(message)?;
        loop {
            self.0.writable().await?;
            match self.0.try_io(Interest::WRITABLE, || put(self.0.as_fd(), &text, fd)) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                done => return done,
            }
        }
    }

    /// The next message; `None` when the other side is gone.
    pub(super) async fn receive<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Option<OwnedFd>)>> {
        loop {
            self.0.readable().await?;
            let (text, fd) = match self.0.try_io(Interest::READABLE, || take(self.0.as_fd())) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                taken => taken?,
            };
            if text.is_empty() {
                return Ok(None);
            }
            if let Ok(message) = serde_json::from_slice(&text) {
                return Ok(Some((message, fd)));
            }
        }
    }
}

/// One message, without waiting on a socket that does not wait.
pub(super) fn put(socket: BorrowedFd<'_>, text: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut extra = SendAncillaryBuffer::new(&mut space);
    let fds = fd.map(|fd| [fd]);
    if let Some(fds) = &fds {
        extra.push(SendAncillaryMessage::ScmRights(fds));
    }
    sendmsg(socket, &[IoSlice::new(text)], &mut extra, SendFlags::NOSIGNAL)?;
    Ok(())
}

fn take(socket: BorrowedFd<'_>) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut text = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(4))];
    let mut extra = RecvAncillaryBuffer::new(&mut space);
    let got = recvmsg(socket, &mut [IoSliceMut::new(&mut text)], &mut extra, RecvFlags::CMSG_CLOEXEC)?;
    let mut fds = extra.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(fds) => Some(fds),
        _ => None,
    });
    let fd = fds.next().and_then(|mut fds| fds.next());
    text.truncate(got.bytes);
    Ok((text, fd))
}
