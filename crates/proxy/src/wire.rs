//! One connection to a backend, as bytes: what was read and not yet understood, what is to be written.
//!
//! Memory is bounded by [`READ_MOST`] for what is read, over all connections by [`Room`], and for what is written by whoever queues it.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::AsyncWrite;
use tokio::net::TcpStream;

use crate::room::Room;

/// A head and a small body fit in; a stream of small events needs no more.
const READ_LEAST: usize = 8 << 10;
/// Of a fast stream. Fewer, larger pieces wake the other side less often, which costs as much as the copying.
const READ_MOST: usize = 512 << 10;
/// Pieces that one system call takes.
const SLICES: usize = 16;

#[derive(Debug)]
pub(crate) struct Wire {
    stream: TcpStream,
    /// Read and not yet understood.
    pub(crate) unread: BytesMut,
    /// How much the next read gets: follows how much there is to read.
    room: Room,
    out: VecDeque<Bytes>,
    queued: usize,
    written: u64,
}

impl Wire {
    pub(crate) fn new(stream: TcpStream) -> Self {
        Self {
            stream,
            unread: BytesMut::new(),
            room: Room::new(READ_LEAST),
            out: VecDeque::new(),
            queued: 0,
            written: 0,
        }
    }

    /// Reads more into `unread`; 0 is the end.
    pub(crate) fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        let room = self.room.size();
        self.unread.reserve(room);
        let offered = self.unread.capacity() - self.unread.len();
        let count = ready!(tokio_util::io::poll_read_buf(Pin::new(&mut self.stream), cx, &mut self.unread))?;
        if count == offered {
            self.room.grow((room * 2).min(READ_MOST));
        } else if count < room / 4 {
            self.room.shrink((room / 2).max(READ_LEAST));
        }
        Poll::Ready(Ok(count))
    }

    pub(crate) fn queue(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.queued += bytes.len();
            self.out.push_back(bytes);
        }
    }

    /// Bytes that wait to be written.
    pub(crate) fn queued(&self) -> usize {
        self.queued
    }

    /// Bytes that the kernel has taken since the last [`Wire::begin`].
    pub(crate) fn written(&self) -> u64 {
        self.written
    }

    /// Makes ready for the next exchange.
    pub(crate) fn begin(&mut self) {
        self.written = 0;
    }

    /// Writes everything that is queued.
    pub(crate) fn poll_flush(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.queued > 0 {
            let mut slices = [IoSlice::new(&[]); SLICES];
            let mut used = 0;
            for (slice, part) in slices.iter_mut().zip(&self.out) {
                *slice = IoSlice::new(part);
                used += 1;
            }
            let stream = Pin::new(&mut self.stream);
            let count = ready!(stream.poll_write_vectored(cx, &slices[..used]))?;
            if count == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.advance(count);
        }
        Poll::Ready(Ok(()))
    }

    fn advance(&mut self, mut count: usize) {
        self.queued -= count;
        self.written += count as u64;
        while count > 0
            && let Some(first) = self.out.front_mut()
        {
            let taken = count.min(first.len());
            first.advance(taken);
            count -= taken;
            if first.is_empty() {
                self.out.pop_front();
            }
        }
    }

    /// Whether the backend has neither closed nor said anything that nobody asked for.
    pub(crate) fn is_quiet(&self) -> bool {
        let silent =
            matches!(self.stream.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock);
        silent && self.unread.is_empty() && self.queued == 0
    }

    /// Gives up the memory that a large exchange needed.
    pub(crate) fn rest(&mut self) {
        self.room.shrink(READ_LEAST);
        if self.unread.capacity() > 2 * READ_LEAST {
            self.unread = BytesMut::new();
        }
    }

    /// The connection for another protocol, and what was read of it already.
    pub(crate) fn into_parts(self) -> (TcpStream, Bytes) {
        (self.stream, self.unread.freeze())
    }
}
