//! The first message of a TLS client, read without answering it.

use std::io;
use std::time::Duration;

use rustls::server::Acceptor;
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

const WAIT: Duration = Duration::from_secs(10);
/// A hello with post-quantum key shares has some 2 KiB.
const MAX: usize = 64 << 10;

/// What a client said, and the bytes it said it with.
pub(super) struct Hello {
    pub(super) bytes: Vec<u8>,
    /// In lower case.
    pub(super) name: Option<String>,
    pub(super) protocols: Vec<Vec<u8>>,
}

/// Reads until the hello is complete; an error for anything else than one.
pub(super) async fn read(stream: &mut TcpStream, bytes: Vec<u8>) -> io::Result<Hello> {
    tokio::time::timeout(WAIT, complete(stream, bytes)).await.map_err(|_| io::ErrorKind::TimedOut)?
}

async fn complete(stream: &mut TcpStream, mut bytes: Vec<u8>) -> io::Result<Hello> {
    let mut acceptor = Acceptor::default();
    let mut fed = 0;
    loop {
        while fed < bytes.len() {
            fed += acceptor.read_tls(&mut &bytes[fed..])?;
            let accepted =
                acceptor.accept().map_err(|(error, _)| io::Error::new(io::ErrorKind::InvalidData, error))?;
            if let Some(accepted) = accepted {
                let hello = accepted.client_hello();
                let name = hello.server_name().map(|name| name.trim_end_matches('.').to_ascii_lowercase());
                let protocols = hello.alpn().into_iter().flatten().map(<[u8]>::to_vec).collect();
                return Ok(Hello { bytes, name, protocols });
            }
        }
        if bytes.len() >= MAX {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if stream.read_buf(&mut bytes).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
}
