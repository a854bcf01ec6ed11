//! Talking to shims from the async side: one request and its answer, a report channel, a subscription.

use std::{io, os::unix::net::UnixStream as StdStream, path::Path, time::Duration};

use sandglass_shim::{
    client,
    protocol::{self, Request, Response},
};
use serde::de::DeserializeOwned;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

/// Longest wait for an answer to anything but a remove.
const PATIENCE: Duration = Duration::from_secs(20);

/// A connection that carries length-prefixed messages.
#[derive(Debug)]
pub(super) struct Channel {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Channel {
    pub(super) fn of(stream: StdStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        Ok(Self { stream: UnixStream::from_std(stream)?, buffer: Vec::new() })
    }

    /// To the shim of `dir`. Refused or not found means that nobody listens.
    pub(super) fn to_shim(dir: &Path) -> io::Result<Self> {
        Self::of(client::connect(dir)?)
    }

    /// The next message; `None` at the end. Safe to drop and call again: bytes received stay in the buffer.
    pub(super) async fn receive<T: DeserializeOwned>(&mut self) -> io::Result<Option<T>> {
        loop {
            if let Some(message) = protocol::decode(&mut self.buffer).map_err(io::Error::other)? {
                return Ok(Some(message));
            }
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
        }
    }

    pub(super) async fn request(&mut self, request: &Request) -> io::Result<Response> {
        let grace = match request {
            Request::Remove { grace_ms } => Duration::from_millis(*grace_ms),
            _ => Duration::ZERO,
        };
        let exchange = async {
            self.stream.write_all(&protocol::encode(request).map_err(io::Error::other)?).await?;
            self.receive().await?.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))
        };
        timeout(PATIENCE + grace, exchange).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

/// One request to the shim of `dir`. The outer error means that there is no shim to ask.
pub(super) async fn ask(dir: &Path, request: &Request) -> io::Result<Response> {
    Channel::to_shim(dir)?.request(request).await
}
