//! One ZMTP connection to a kernel on loopback.
//!
//! Memory: one message (see `zmtp`), and the messages of one read. Invariant: [`Socket::next`] may be cancelled at
//! any time without losing a byte.

use std::collections::VecDeque;
use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::zmtp::{self, Decoder, Multipart, Role};

/// How long a peer that accepted may take to introduce itself.
const INTRODUCTION: Duration = Duration::from_secs(10);
const READ: usize = 64 << 10;

pub(super) struct Socket {
    stream: TcpStream,
    decoder: Decoder,
    inbox: VecDeque<Multipart>,
    out: Vec<u8>,
    written: usize,
}

impl Socket {
    pub(super) async fn connect(port: u16, role: Role) -> io::Result<Self> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).await?;
        stream.set_nodelay(true)?;
        stream.write_all(&zmtp::opening(role)).await?;
        let decoder = Decoder::default();
        let mut socket = Socket { stream, decoder, inbox: VecDeque::new(), out: Vec::new(), written: 0 };
        let introduced = async {
            while !socket.decoder.is_ready() {
                socket.stream.readable().await?;
                socket.read()?;
            }
            io::Result::Ok(())
        };
        match timeout(INTRODUCTION, introduced).await {
            Ok(done) => {
                done?;
                if role == Role::Subscriber {
                    socket.send(&[zmtp::SUBSCRIPTION]);
                    socket.write()?;
                }
                Ok(socket)
            }
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, "the kernel's port does not speak ZMTP")),
        }
    }

    /// Queues a message; it goes out while [`Socket::next`] is waited for.
    pub(super) fn send(&mut self, parts: &[&[u8]]) {
        zmtp::encode(&mut self.out, parts);
    }

    pub(super) async fn next(&mut self) -> io::Result<Multipart> {
        loop {
            if let Some(message) = self.inbox.pop_front() {
                return Ok(message);
            }
            let wanted = if self.written < self.out.len() {
                Interest::READABLE | Interest::WRITABLE
            } else {
                Interest::READABLE
            };
            let ready = self.stream.ready(wanted).await?;
            if ready.is_writable() {
                self.write()?;
            }
            if ready.is_readable() {
                self.read()?;
            }
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while self.written < self.out.len() {
            match self.stream.try_write(&self.out[self.written..]) {
                Ok(count) => self.written += count,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        self.out = Vec::new();
        self.written = 0;
        Ok(())
    }

    fn read(&mut self) -> io::Result<()> {
        let mut buffer = Vec::with_capacity(READ);
        match self.stream.try_read_buf(&mut buffer) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => {
                let inbox = &mut self.inbox;
                let taken = self.decoder.push(&buffer, |message| inbox.push_back(message));
                taken.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(error) => Err(error),
        }
    }
}
