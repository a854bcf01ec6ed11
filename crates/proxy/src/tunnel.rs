//! Bytes between two connections, copied and not understood.
//!
//! Invariants: a side that ends is told to the other, and the other direction goes on; a tunnel in which nothing moves holds no buffer.

use std::cell::RefCell;
use std::fmt;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use crate::pulse::Beat;

/// Read at once. One such buffer is shared by all tunnels of a thread, because bytes stay in it only until they are written.
const AT_ONCE: usize = 64 << 10;

thread_local! {
    static BUFFER: RefCell<Box<[u8]>> = RefCell::new(vec![0; AT_ONCE].into_boxed_slice());
}

/// Takes a connection back from the HTTP library, which reads and writes it with detours. Whoever listens puts it into the extensions of
/// requests. The connection is returned as it was if it is of another kind.
#[derive(Clone, Copy, Debug)]
pub struct Reclaim(pub fn(Upgraded) -> Result<Reclaimed, Upgraded>);

/// A client's connection without HTTP.
pub struct Reclaimed {
    pub socket: Socket,
    /// Read from it before.
    pub read: Bytes,
    /// Ends the tunnel.
    pub cut: CancellationToken,
    /// Dropped with the connection.
    pub open: Box<dyn Send>,
}

/// What bytes come from.
pub enum Socket {
    Tcp(TcpStream),
    /// Such as TLS.
    Other(Box<dyn Duplex>),
}

/// Both ways of a connection.
pub trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Duplex for S {}

impl fmt::Debug for Reclaimed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reclaimed").field("read", &self.read.len()).finish_non_exhaustive()
    }
}

impl fmt::Debug for Socket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self, Self::Tcp(_)) { "Tcp" } else { "Other" })
    }
}

/// Copies both ways until both sides have ended, or one fails. What was read before goes first.
pub(crate) async fn run(
    client: Upgraded,
    reclaim: Option<Reclaim>,
    backend: (TcpStream, Bytes),
    beat: Beat,
) -> io::Result<()> {
    let reclaimed = match reclaim {
        Some(Reclaim(reclaim)) => reclaim(client),
        None => Err(client),
    };
    let Reclaimed { socket, read, cut, open: _open } = match reclaimed {
        Ok(reclaimed) => reclaimed,
        Err(client) => return both((TokioIo::new(client), Bytes::new()), backend, beat).await,
    };
    let copied = async {
        match socket {
            Socket::Tcp(stream) => both((stream, read), backend, beat).await,
            Socket::Other(stream) => both((stream, read), backend, beat).await,
        }
    };
    cut.run_until_cancelled(copied).await.unwrap_or_else(|| Err(io::ErrorKind::ConnectionAborted.into()))
}

async fn both<C>(
    (mut client, from_client): (C, Bytes),
    (mut backend, from_backend): (TcpStream, Bytes),
    mut beat: Beat,
) -> io::Result<()>
where
    C: AsyncRead + AsyncWrite + Unpin,
{
    let (mut up, mut down) = (Flow::new(from_client), Flow::new(from_backend));
    std::future::poll_fn(|cx| {
        let up = up.poll(cx, (&mut client, &mut backend), &mut beat)?;
        let down = down.poll(cx, (&mut backend, &mut client), &mut beat)?;
        if up.is_ready() && down.is_ready() { Poll::Ready(Ok(())) } else { Poll::Pending }
    })
    .await
}

/// One direction.
struct Flow {
    /// Read, and not taken by the other side yet. At most [`AT_ONCE`].
    left: Bytes,
    state: State,
}

#[derive(PartialEq, Eq)]
enum State {
    Open,
    Written,
    Ended,
    Over,
}

impl Flow {
    fn new(left: Bytes) -> Self {
        Self { left, state: State::Written }
    }

    fn poll<F, T>(
        &mut self,
        cx: &mut Context<'_>,
        (from, to): (&mut F, &mut T),
        beat: &mut Beat,
    ) -> Poll<io::Result<()>>
    where
        F: AsyncRead + Unpin,
        T: AsyncWrite + Unpin,
    {
        loop {
            while !self.left.is_empty() {
                let count = ready!(Pin::new(&mut *to).poll_write(cx, &self.left))?;
                if count == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                self.left.advance(count);
                self.state = State::Written;
            }
            // Lets go of what was allocated for it.
            self.left = Bytes::new();
            match self.state {
                State::Over => return Poll::Ready(Ok(())),
                State::Ended => {
                    ready!(Pin::new(&mut *to).poll_shutdown(cx))?;
                    self.state = State::Over;
                }
                State::Open | State::Written => {
                    if self.poll_move(cx, from, to)?.is_ready() {
                        beat.moved();
                    } else {
                        // Nothing more to come for now, so what is there has to go out.
                        if self.state == State::Written {
                            ready!(Pin::new(&mut *to).poll_flush(cx))?;
                            self.state = State::Open;
                        }
                        return Poll::Pending;
                    }
                }
            }
        }
    }

    /// Reads once, and writes what can be written of it.
    fn poll_move<F, T>(&mut self, cx: &mut Context<'_>, from: &mut F, to: &mut T) -> Poll<io::Result<()>>
    where
        F: AsyncRead + Unpin,
        T: AsyncWrite + Unpin,
    {
        BUFFER.with_borrow_mut(|buffer| {
            let mut buffer = ReadBuf::new(buffer);
            ready!(Pin::new(from).poll_read(cx, &mut buffer))?;
            let read = buffer.filled();
            if read.is_empty() {
                self.state = State::Ended;
                return Poll::Ready(Ok(()));
            }
            let taken = match Pin::new(to).poll_write(cx, read)? {
                Poll::Ready(0) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(count) => count,
                Poll::Pending => 0,
            };
            self.state = State::Written;
            self.left = Bytes::copy_from_slice(&read[taken..]);
            Poll::Ready(Ok(()))
        })
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpListener;

    use super::*;

    async fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (one, other) = tokio::join!(TcpStream::connect(address), listener.accept());
        (one.unwrap(), other.unwrap().0)
    }

    #[tokio::test]
    async fn what_one_side_sends_the_other_gets_after_its_end_too() {
        let ((mut client, inner), (mut backend, outer)) = (pair().await, pair().await);
        let tunnel = tokio::spawn(both(
            (inner, Bytes::from_static(b"a")),
            (outer, Bytes::from_static(b"b")),
            Beat::default(),
        ));
        // More than the sockets hold, so that the tunnel has to wait for both.
        let big: Vec<u8> = (0..20 << 20).map(|at: u32| at.to_le_bytes()[1]).collect();
        let sent = big.clone();
        let sending = tokio::spawn(async move {
            client.write_all(&sent).await.unwrap();
            client.shutdown().await.unwrap();
            let mut got = Vec::new();
            client.read_to_end(&mut got).await.unwrap();
            got
        });
        let mut got = Vec::new();
        backend.read_to_end(&mut got).await.unwrap();
        assert!(got[0] == b'a' && got[1..] == big[..]);
        backend.write_all(b"late").await.unwrap();
        backend.shutdown().await.unwrap();
        assert_eq!(sending.await.unwrap(), b"blate");
        tunnel.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn a_side_that_is_gone_ends_it() {
        let ((client, inner), (backend, outer)) = (pair().await, pair().await);
        let tunnel = tokio::spawn(both((inner, Bytes::new()), (outer, Bytes::new()), Beat::default()));
        drop((client, backend));
        let _ = tunnel.await.unwrap();
    }
}
