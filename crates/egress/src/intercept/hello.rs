//! How a connection begins: the first message of a TLS client, read without answering it, or something else.

use std::io;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

const WAIT: Duration = Duration::from_secs(30);
/// A hello with post-quantum key shares has some 2 KiB.
const MAX: usize = 64 << 10;

/// What a client said, and the bytes it said it with.
pub(super) struct Hello {
    pub(super) bytes: Vec<u8>,
    /// In lower case.
    pub(super) name: Option<String>,
    pub(super) protocols: Vec<Vec<u8>>,
}

/// What the first bytes are.
pub(super) enum Opening {
    Hello(Hello),
    /// It begins as TLS and goes on as something that cannot be read.
    Broken,
    /// These bytes of plain HTTP.
    Http(Vec<u8>),
    /// These bytes of something else.
    Other(Vec<u8>),
}

/// A TLS record with handshake messages; no HTTP method begins like that.
const HANDSHAKE: u8 = 22;

const METHODS: [&[u8]; 10] = [
    b"GET ",
    b"HEAD ",
    b"POST ",
    b"PUT ",
    b"PATCH ",
    b"DELETE ",
    b"OPTIONS ",
    b"CONNECT ",
    b"TRACE ",
    b"PRI ",
];

/// Reads until the hello is complete or clearly none.
pub(super) async fn read(stream: &mut TcpStream) -> io::Result<Opening> {
    tokio::time::timeout(WAIT, complete(stream)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

async fn complete(stream: &mut TcpStream) -> io::Result<Opening> {
    let mut bytes = Vec::new();
    let mut acceptor = Acceptor::default();
    let mut fed = 0;
    loop {
        if bytes.first().is_some_and(|first| *first != HANDSHAKE) {
            return Ok(other(bytes));
        }
        while fed < bytes.len() {
            fed += acceptor.read_tls(&mut &bytes[fed..])?;
            let Ok(accepted) = acceptor.accept() else { return Ok(Opening::Broken) };
            if let Some(accepted) = accepted {
                let hello = accepted.client_hello();
                let name = hello.server_name().map(|name| name.trim_end_matches('.').to_ascii_lowercase());
                let protocols = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
                return Ok(Opening::Hello(Hello { bytes, name, protocols }));
            }
        }
        if bytes.len() >= MAX {
            return Ok(Opening::Broken);
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}

fn other(bytes: Vec<u8>) -> Opening {
    let begins = |method: &&[u8]| bytes.starts_with(method) || method.starts_with(&bytes);
    if METHODS.iter().any(begins) { Opening::Http(bytes) } else { Opening::Other(bytes) }
}
