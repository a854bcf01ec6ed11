//! The server's side of `shim.sock`: connect, ask, subscribe.
//!
//! Blocking calls on std sockets with a timeout. An async caller takes [`connect`] for the socket and
//! [`crate::protocol`] for the bytes. Several requests may follow each other on one connection.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde::de::DeserializeOwned;

use crate::protocol::{self, CreateReport, Notice, Request, Response};

/// Name of the control socket in a sandbox directory.
pub const SOCKET: &str = "shim.sock";

/// Connects to the shim of `dir`; refused or not found means that no shim listens.
///
/// The socket's address is given relative to an open directory, because a socket address holds only 107 bytes
/// and state directories may be deeper.
pub fn connect(dir: &Path) -> io::Result<UnixStream> {
    let handle = std::fs::File::open(dir)?;
    UnixStream::connect(format!("/proc/self/fd/{}/{SOCKET}", handle.as_raw_fd()))
}

/// A connection to one shim.
#[derive(Debug)]
pub struct Client {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Client {
    /// Connects with a timeout for every later read and write.
    pub fn connect(dir: &Path, timeout: Duration) -> io::Result<Self> {
        let stream = connect(dir)?;
        stream.set_read_timeout(Some(timeout))?;
        stream.set_write_timeout(Some(timeout))?;
        Ok(Self { stream, buffer: Vec::new() })
    }

    /// Asks and waits for the answer; a refusal is an answer with `ok` false, not an error.
    pub fn request(&mut self, request: &Request) -> io::Result<Response> {
        self.stream.write_all(&protocol::encode(request).map_err(io::Error::other)?)?;
        read_message(&mut self.stream, &mut self.buffer)?.ok_or_else(|| io::ErrorKind::UnexpectedEof.into())
    }

    /// The next event after [`Request::Subscribe`]; `None` when the shim is gone.
    pub fn next_notice(&mut self) -> io::Result<Option<Notice>> {
        read_message(&mut self.stream, &mut self.buffer)
    }

    /// Changes how long reads wait, for example before a remove with a long grace.
    pub fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        self.stream.set_read_timeout(Some(timeout))
    }
}

/// Waits for the one message of a report channel; `None` when the shim died before it could report.
pub fn read_report(channel: &mut UnixStream) -> io::Result<Option<CreateReport>> {
    read_message(channel, &mut Vec::new())
}

fn read_message<T: DeserializeOwned>(stream: &mut UnixStream, buffer: &mut Vec<u8>) -> io::Result<Option<T>> {
    let mut chunk = [0; 4096];
    loop {
        if let Some(message) = protocol::decode(buffer).map_err(io::Error::other)? {
            return Ok(Some(message));
        }
        match stream.read(&mut chunk) {
            Ok(0) => return Ok(None),
            Ok(n) => buffer.extend_from_slice(&chunk[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}
