//! The beginning of a TLS connection that passes undecrypted: a server may ask for a second hello, and that one could name another host.

use std::io;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::inspect::first::{self, First};
use crate::inspect::tls::{self, Reply};

use super::hello::Hello;
use super::tunnel::Stream;

/// For the server's answer to a hello, and for the client's to that.
const WAIT: Duration = Duration::from_secs(30);

const BUFFER: usize = 4 << 10;

/// What the beginning was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Greeting {
    /// Neither side will name a host any more.
    Over,
    /// The second hello does not name the host of the first.
    Changed,
}

/// Passes the hello on, then the server's answer, then a second hello if that answer asks for one. What the client sends behind its hello is
/// held back until then: servers do not need it to answer.
pub(super) async fn greet(
    client: &mut impl Stream,
    server: &mut impl Stream,
    hello: Hello,
) -> io::Result<Greeting> {
    let Hello { bytes, length, first, .. } = hello;
    let (ahead, behind) = bytes.split_at(length);
    server.write_all(ahead).await?;
    server.flush().await?;
    let mut answer = Vec::with_capacity(BUFFER);
    while tls::reply(&answer) == Reply::More {
        if within(server.read_buf(&mut answer)).await? == 0 {
            break;
        }
    }
    client.write_all(&answer).await?;
    client.flush().await?;
    let mut behind = behind.to_vec();
    if tls::reply(&answer) == Reply::Retry {
        let again = second(client, server, &first, &mut behind);
        if within(again).await? == Greeting::Changed {
            return Ok(Greeting::Changed);
        }
    }
    server.write_all(&behind).await?;
    server.flush().await?;
    Ok(Greeting::Over)
}

/// Reads until the second hello is complete. Meanwhile the client gets the rest of what the server says.
async fn second(
    client: &mut impl Stream,
    server: &mut impl Stream,
    first: &First,
    behind: &mut Vec<u8>,
) -> io::Result<Greeting> {
    let mut more = Vec::with_capacity(BUFFER);
    loop {
        match first::read_again(first, behind) {
            First::More => {}
            First::Named { .. } | First::Unnamed { .. } => return Ok(Greeting::Over),
            First::Broken(_) | First::Foreign => return Ok(Greeting::Changed),
        }
        let read = tokio::select! {
            read = client.read_buf(behind) => read?,
            read = server.read_buf(&mut more) => read?,
        };
        if read == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        client.write_all(&more).await?;
        client.flush().await?;
        more.clear();
    }
}

async fn within<T>(reading: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    tokio::time::timeout(WAIT, reading).await.map_err(|_| io::ErrorKind::TimedOut)?
}
