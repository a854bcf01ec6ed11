//! How a connection begins: the first message of a TLS client, read without answering it, or something else.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

use crate::inspect::first::{self, First, Protocol};
use crate::inspect::host::Host;

const WAIT: Duration = Duration::from_secs(30);

/// What a client said, and the bytes it said it with.
#[derive(Debug)]
pub(super) struct Hello {
    pub(super) bytes: Vec<u8>,
    /// Of the bytes, those that are the hello; others may follow.
    pub(super) length: usize,
    pub(super) first: First,
    /// In lower case.
    pub(super) name: Option<String>,
    /// What stands there instead of a name, which no standard provides for.
    pub(super) literal: Option<IpAddr>,
    pub(super) protocols: Vec<Vec<u8>>,
}

/// What the first bytes are.
#[derive(Debug)]
pub(super) enum Opening {
    Hello(Hello),
    /// It begins as a protocol that carries names and goes on as something that servers may read in ways of their own.
    Broken(Protocol),
    /// These bytes of plain HTTP: a request line at least, or the preface of HTTP/2.
    Http(Vec<u8>),
    /// These bytes of a protocol without names.
    Foreign(Vec<u8>),
}

/// Reads until it is clear what it is; a hello until it is complete.
pub(super) async fn read(stream: &mut TcpStream) -> io::Result<Opening> {
    tokio::time::timeout(WAIT, complete(stream)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

async fn complete(stream: &mut TcpStream) -> io::Result<Opening> {
    let mut bytes = Vec::new();
    loop {
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        // Whoever reads each request does not need the whole head of the first one here, which may be longer than is looked at.
        if first::begins_request(&bytes) {
            return Ok(Opening::Http(bytes));
        }
        match first::read(&bytes) {
            First::More => {}
            First::Foreign => return Ok(Opening::Foreign(bytes)),
            First::Broken(protocol) => return Ok(Opening::Broken(protocol)),
            first @ (First::Named { protocol: Protocol::Tls, length, .. }
            | First::Unnamed { protocol: Protocol::Tls, length }) => return Ok(hello(bytes, length, first)),
            First::Named { .. } | First::Unnamed { .. } => return Ok(Opening::Http(bytes)),
        }
    }
}

/// The same hello as the TLS library reads it. Where the two differ, servers might.
fn hello(bytes: Vec<u8>, length: usize, first: First) -> Opening {
    let broken = Opening::Broken(Protocol::Tls);
    let mut acceptor = Acceptor::default();
    let mut rest = &bytes[..length];
    let accepted = loop {
        match acceptor.accept() {
            Ok(Some(accepted)) => break accepted,
            Ok(None) if !rest.is_empty() && acceptor.read_tls(&mut rest).is_ok() => {}
            Ok(None) | Err(_) => return broken,
        }
    };
    let (name, literal) = match &first {
        First::Named { host: Host::Name(name), .. } => (Some(name.clone()), None),
        First::Named { host: Host::Address(address), .. } => (None, Some(address.to_canonical())),
        _ => (None, None),
    };
    let hello = accepted.client_hello();
    let read = hello.server_name().map(|name| name.trim_end_matches('.').to_ascii_lowercase());
    if read != name {
        return broken;
    }
    let protocols = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
    Opening::Hello(Hello { bytes, length, first, name, literal, protocols })
}
