//! Bytes that are passed on without being understood.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Of each direction.
const BUFFER: usize = 16 << 10;

/// A two-way stream behind a pointer.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Copies both ways until both have ended or one has failed.
pub(super) async fn join(mut one: impl Stream, mut other: impl Stream) {
    // Either side may hang up at any time; that is the normal end.
    let _ = tokio::io::copy_bidirectional_with_sizes(&mut one, &mut other, BUFFER, BUFFER).await;
}

/// A stream of which the beginning was read already.
pub(super) struct Replayed<S> {
    ahead: io::Cursor<Vec<u8>>,
    stream: S,
}

impl<S> Replayed<S> {
    pub(super) fn new(ahead: Vec<u8>, stream: S) -> Self {
        Self { ahead: io::Cursor::new(ahead), stream }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Replayed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let at = usize::try_from(self.ahead.position()).unwrap_or(usize::MAX);
        let left = self.ahead.get_ref().get(at..).unwrap_or_default();
        if left.is_empty() {
            if at > 0 {
                self.ahead = io::Cursor::default();
            }
            return Pin::new(&mut self.stream).poll_read(cx, buf);
        }
        let taken = left.len().min(buf.remaining());
        buf.put_slice(&left[..taken]);
        self.ahead.set_position(u64::try_from(at + taken).unwrap_or(u64::MAX));
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Replayed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}
