//! The bytes of one connection, on their way to whoever parses them.
//!
//! Invariant: as long as this exists, upgraded or not, the connection counts as open.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf, Bytes, BytesMut};
use sandglass_proxy::{Reclaimed, Socket};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep_until},
};
use tokio_util::{
    io::poll_read_buf,
    sync::{CancellationToken, WaitForCancellationFutureOwned},
    task::task_tracker::TaskTrackerToken,
};

use super::{
    gate::{Gate, STAND_IN},
    inspector::{Inspector, Want},
    malformed::Malformed,
    settings::Limits,
    stream::Stream,
};

/// Read at once where the bytes have to be looked at.
const HEAD_PIECE: usize = 4 << 10;
const BODY_PIECE: usize = 64 << 10;
/// After a refusal the rest is read for so long and so far, because closing with unread bytes would destroy the answer on its way.
const LINGER: Duration = Duration::from_secs(2);
const LINGER_BYTES: usize = 1 << 20;

/// What keeps a connection counted, and what ends it.
#[derive(Debug)]
pub(super) struct Open {
    pub(super) _slot: OwnedSemaphorePermit,
    pub(super) _counted: TaskTrackerToken,
    /// Of this connection alone, so that asking costs nobody else anything.
    pub(super) cut: CancellationToken,
}

/// See the module documentation.
pub(super) struct Wire {
    stream: Stream,
    inspector: Inspector,
    gate: Arc<Gate>,
    unread: BytesMut,
    passed: BytesMut,
    /// How long the head that has begun may still take.
    deadline: Option<Pin<Box<Sleep>>>,
    head: Duration,
    max_unread: usize,
    /// Nothing more is passed on.
    over: bool,
    linger: Option<(Pin<Box<Sleep>>, usize)>,
    cut: Pin<Box<WaitForCancellationFutureOwned>>,
    open: Open,
}

impl Wire {
    /// A connection of which `begun` has been read already. It is looked at if it is HTTP/1.
    pub(super) fn new(
        (stream, begun): (Stream, BytesMut),
        inspector: Inspector,
        gate: Arc<Gate>,
        limits: &Limits,
        open: Open,
    ) -> Self {
        Self {
            stream,
            inspector,
            gate,
            unread: begun,
            passed: BytesMut::new(),
            deadline: None,
            head: limits.head,
            max_unread: limits.head_bytes,
            over: false,
            linger: None,
            cut: Box::pin(open.cut.clone().cancelled_owned()),
            open,
        }
    }

    /// An upgraded connection without what it takes to be HTTP. `read` was passed on already.
    pub(super) fn reclaim(self, read: Bytes) -> Reclaimed {
        let Self { stream, unread, passed, open, .. } = self;
        let read = if unread.is_empty() && passed.is_empty() {
            read
        } else {
            [&read[..], &passed, &unread].concat().into()
        };
        let socket = match stream {
            Stream::Plain(stream) => Socket::Tcp(stream),
            Stream::Tls(stream) => Socket::Other(stream),
        };
        Reclaimed { socket, read, cut: open.cut.clone(), open: Box::new(open) }
    }

    /// Looks at what has come; what is in order can be read afterwards.
    fn inspect(&mut self) -> io::Result<()> {
        let within_body = self.inspector.want(&self.unread) == Want::Body;
        match self.inspector.pass(&mut self.unread, &mut self.passed) {
            Ok(()) => {
                if self.inspector.want(&self.unread) != Want::RestOfHead {
                    self.deadline = None;
                }
                Ok(())
            }
            Err(why) => self.refuse(why, within_body && self.passed.is_empty()),
        }
    }

    fn refuse(&mut self, why: Malformed, within_body: bool) -> io::Result<()> {
        (self.over, self.deadline) = (true, None);
        self.unread.clear();
        if why == Malformed::Chunk {
            self.gate.break_off(why);
            // What was read before it is still passed on; the next read fails.
            return if within_body { Err(io::ErrorKind::InvalidData.into()) } else { Ok(()) };
        }
        self.gate.refuse(why);
        self.passed.extend_from_slice(STAND_IN);
        Ok(())
    }

    /// Whether the head that has begun takes too long.
    fn poll_too_slow(&mut self, cx: &mut Context<'_>) -> bool {
        if self.inspector.want(&self.unread) != Want::RestOfHead {
            return false;
        }
        let head = self.head;
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep_until(Instant::now() + head)));
        deadline.as_mut().poll(cx).is_ready()
    }

    /// Reads more to look at; `Ready(0)` at the end.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.unread.len() >= self.max_unread {
            return Poll::Pending;
        }
        let within_body = self.inspector.want(&self.unread) == Want::Body;
        self.unread.reserve(if within_body { BODY_PIECE } else { HEAD_PIECE });
        let read = poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.unread);
        if read.is_pending() && self.unread.is_empty() {
            // A connection that waits keeps no memory for what may come.
            self.unread = BytesMut::new();
        }
        read
    }

    fn hand_out(&mut self, out: &mut ReadBuf<'_>) {
        let here = self.passed.len().min(out.remaining());
        out.put_slice(&self.passed[..here]);
        self.passed.advance(here);
        if self.passed.is_empty() {
            // Frees the memory, which a connection would otherwise keep while it is idle.
            self.passed = BytesMut::new();
        }
    }

    /// Straight through, without a look.
    fn poll_unwatched(&mut self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = out.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, out))?;
        self.inspector.went_by(out.filled().len() - before);
        Poll::Ready(Ok(()))
    }

    /// One step towards bytes that can be handed out; `Break` is the answer of the whole read.
    fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<Step>> {
        if self.inspector.want(&self.unread) == Want::Decision
            && let Poll::Ready(upgraded) = self.gate.poll_decision(cx)
        {
            self.inspector.decide(upgraded);
            self.inspect()?;
            return Poll::Ready(Ok(Step::Again));
        }
        match self.poll_more(cx) {
            Poll::Ready(Ok(0)) => Poll::Ready(Ok(Step::End)),
            Poll::Ready(Ok(_)) => {
                self.inspect()?;
                Poll::Ready(Ok(Step::Again))
            }
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Pending if self.poll_too_slow(cx) => {
                self.refuse(Malformed::TooSlow, false)?;
                Poll::Ready(Ok(Step::Again))
            }
            Poll::Pending => Poll::Pending,
        }
    }

    /// Reads and forgets, so that an answer arrives that was given before the end of what the client sends.
    fn poll_linger(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let (until, left) =
            self.linger.get_or_insert_with(|| (Box::pin(sleep_until(Instant::now() + LINGER)), LINGER_BYTES));
        if until.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        loop {
            self.unread.clear();
            self.unread.reserve(BODY_PIECE);
            match ready!(poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.unread)) {
                Ok(read @ 1..) if read < *left => *left -= read,
                _ => return Poll::Ready(()),
            }
        }
    }
}

enum Step {
    Again,
    End,
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let wire = &mut *self;
        if wire.cut.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        if !wire.unread.is_empty() && !wire.over {
            wire.inspect()?;
        }
        loop {
            if !wire.passed.is_empty() {
                wire.hand_out(out);
                return Poll::Ready(Ok(()));
            }
            if wire.over {
                // After a stand-in there is nothing; after a broken body there is an error.
                return match wire.gate.broken() {
                    Some(_) => Poll::Ready(Err(io::ErrorKind::InvalidData.into())),
                    None => Poll::Pending,
                };
            }
            if wire.unread.is_empty() && wire.inspector.unwatched() >= out.remaining() {
                return wire.poll_unwatched(cx, out);
            }
            match ready!(wire.poll_step(cx))? {
                Step::Again => {}
                Step::End => return Poll::Ready(Ok(())),
            }
        }
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if self.open.cut.is_cancelled() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.linger.is_none() {
            ready!(Pin::new(&mut self.stream).poll_shutdown(cx))?;
        }
        if self.over && self.cut.as_mut().poll(cx).is_pending() {
            ready!(self.poll_linger(cx));
        }
        Poll::Ready(Ok(()))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.open.cut.is_cancelled() {
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Pin::new(&mut self.stream).poll_write_vectored(cx, parts)
    }
}
