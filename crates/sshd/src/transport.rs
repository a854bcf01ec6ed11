//! The byte stream under a connection, with two handles on it: an end, and a breath between reads.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// When to read again; see [`crate::flow`] for who asks for it.
#[derive(Debug, Default)]
pub(crate) struct Breath(Mutex<Option<Instant>>);

impl Breath {
    pub(crate) fn until(&self, when: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(when);
    }

    fn take(&self) -> Option<Instant> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A stream that fails as soon as its connection is closed from this side: the protocol's own task cannot be stopped
/// in any other way.
pub(crate) struct Transport<S> {
    stream: S,
    closed: Pin<Box<WaitForCancellationFutureOwned>>,
    breath: Arc<Breath>,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Transport<S> {
    pub(crate) fn new(stream: S, closing: CancellationToken, breath: Arc<Breath>) -> Self {
        Transport { stream, closed: Box::pin(closing.cancelled_owned()), breath, waiting: None }
    }

    fn check_closed(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        match self.closed.as_mut().poll(context) {
            Poll::Ready(()) => Err(io::ErrorKind::ConnectionAborted.into()),
            Poll::Pending => Ok(()),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Transport<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.check_closed(context)?;
        if let Some(until) = self.breath.take() {
            self.waiting = Some(Box::pin(sleep_until(until)));
        }
        if let Some(waiting) = &mut self.waiting {
            std::task::ready!(waiting.as_mut().poll(context));
            self.waiting = None;
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Transport<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.check_closed(context)?;
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
