//! Pipes between a process and the agent, and reading them without waiting.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;

use rustix::pipe::{PipeFlags, pipe_with};
use tokio::net::unix::pipe;

/// One read's worth. Larger makes the event text of very short lines a multi-megabyte burst.
pub(super) const READ: usize = 64 << 10;
/// Lets a writer run ahead while the one thread is busy sending.
const PIPE: usize = 256 << 10;

thread_local! {
    /// Reads never span an await, so all streams of the one runtime thread share a buffer.
    static BUFFER: RefCell<Vec<u8>> = RefCell::new(vec![0; READ]);
}

pub(crate) fn pipe() -> io::Result<(pipe::Receiver, OwnedFd)> {
    let (read, write) = pipe_with(PipeFlags::CLOEXEC)?;
    // Refused beyond the user's pipe budget; the default size works too.
    let _ = rustix::pipe::fcntl_setpipe_size(&write, PIPE);
    Ok((pipe::Receiver::from_owned_fd(read)?, write))
}

/// A standard input at its end: `/dev/null`, or a pipe nobody writes to where the image has no `/dev`.
pub(crate) fn empty_input() -> io::Result<OwnedFd> {
    match std::fs::File::open("/dev/null") {
        Ok(file) => Ok(file.into()),
        Err(_) => Ok(pipe_with(PipeFlags::CLOEXEC)?.0),
    }
}

/// What one attempt to read found.
pub(crate) enum Read {
    Some(usize),
    Nothing,
    End,
}

/// Reads once if bytes are there, and hands them to `sink`.
pub(crate) fn try_read(pipe: &pipe::Receiver, sink: impl FnOnce(&[u8])) -> Read {
    try_read_some(pipe, READ, sink)
}

/// As `try_read`, at most `most` bytes.
pub(super) fn try_read_some(pipe: &pipe::Receiver, most: usize, sink: impl FnOnce(&[u8])) -> Read {
    BUFFER.with_borrow_mut(|buffer| {
        let buffer = &mut buffer[..most.min(READ)];
        let read = match pipe.try_read(buffer) {
            // The runtime only knows of bytes that had come when it last looked; the kernel knows of all.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                rustix::io::read(pipe, &mut *buffer).map_err(io::Error::from)
            }
            read => read,
        };
        match read {
            Ok(0) => Read::End,
            Ok(count) => {
                sink(&buffer[..count]);
                Read::Some(count)
            }
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                Read::Nothing
            }
            Err(_) => Read::End,
        }
    })
}

/// Bytes waiting in the pipe right now.
pub(crate) fn waiting(pipe: &pipe::Receiver) -> usize {
    rustix::io::ioctl_fionread(pipe).map_or(0, |n| usize::try_from(n).unwrap_or(usize::MAX))
}

/// Reads and forgets until the last writer is gone, so that nobody ever dies of a closed pipe.
pub(crate) async fn discard(pipe: pipe::Receiver) {
    while pipe.readable().await.is_ok() {
        if matches!(try_read(&pipe, |_| ()), Read::End) {
            return;
        }
        // A pipe that is never empty would keep the thread.
        tokio::task::yield_now().await;
    }
}
