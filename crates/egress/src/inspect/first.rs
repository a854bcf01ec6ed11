//! What the first bytes of a connection are.

use super::host::Host;
use super::{http, tls};

/// Bytes that are looked at. A hello with large keys and tickets takes 2 KiB, a request's head rarely more.
pub const LIMIT: usize = 16 * 1024;

/// A protocol that carries names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tls,
    Http,
    Http2,
}

/// What was found in a connection's first bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum First {
    /// It takes more bytes to say.
    More,
    /// The first `length` bytes name a host.
    Named { protocol: Protocol, host: Host, length: usize },
    /// A protocol that carries names, without one.
    Unnamed { protocol: Protocol, length: usize },
    /// Something that a server might understand as such a protocol in a way of its own.
    Broken(Protocol),
    /// Something without names.
    Foreign,
}

impl First {
    /// The same behind other bytes.
    pub fn behind(self, bytes: usize) -> Self {
        match self {
            Self::Named { protocol, host, length } => Self::Named { protocol, host, length: bytes + length },
            Self::Unnamed { protocol, length } => Self::Unnamed { protocol, length: bytes + length },
            other => other,
        }
    }
}

/// What proxies say before a client's first byte: the server would read what follows as that.
const PROXIED: [&[u8]; 2] = [b"PROXY ", b"\r\n\r\n\0\r\nQUIT\n"];

/// Whether it is HTTP without TLS: its first line is a request's, or the preface of HTTP/2. For those who read what follows themselves.
pub fn begins_request(bytes: &[u8]) -> bool {
    tls::begins(bytes) == Some(false) && http::begins_request(bytes)
}

/// Reads the first bytes of what a client sends. Once this is not [`First::More`], more bytes do not change it.
pub fn read(bytes: &[u8]) -> First {
    let seen = &bytes[..bytes.len().min(LIMIT)];
    let records = tls::begins(seen);
    let found = match (seen, records) {
        ([], _) | (_, None) => First::More,
        _ if PROXIED.iter().any(|said| seen.starts_with(said)) => First::Broken(Protocol::Http),
        _ if PROXIED.iter().any(|said| said.starts_with(seen)) => First::More,
        (_, Some(true)) => tls::read(seen),
        // It may become a hello in the old format.
        ([first], _) | ([first, _], _) | ([first, _, _], _) if first & 0x80 != 0 => First::More,
        _ if tls::begins_as_version_2(seen) => First::Broken(Protocol::Tls),
        _ => http::read(seen),
    };
    match found {
        First::More if bytes.len() >= LIMIT => {
            First::Broken(if records == Some(true) { Protocol::Tls } else { Protocol::Http })
        }
        found => found,
    }
}

/// Reads what a client sends behind its hello once the server has asked for another one. It has to name the same host: servers differ in
/// which of the two they heed.
pub fn read_again(first: &First, bytes: &[u8]) -> First {
    let seen = &bytes[..bytes.len().min(LIMIT)];
    match (first, tls::read_again(seen)) {
        (_, First::More) if bytes.len() < LIMIT => First::More,
        (First::Named { host, .. }, First::Named { protocol, host: again, length }) if *host == again => {
            First::Named { protocol, host: again, length }
        }
        (First::Unnamed { .. }, again @ First::Unnamed { .. }) => again,
        _ => First::Broken(Protocol::Tls),
    }
}
