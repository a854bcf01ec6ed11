//! Writing a command's output to our own standard streams without blocking the event loop.
//!
//! One thread does all writes, in order, so that a reader who stalls stops the flow but not Ctrl-C. Invariant: bytes
//! are written as they come; nothing is translated or held back.

use std::{
    io::{self, Write},
    os::fd::AsFd,
    thread,
};

use rustix::event::{PollFd, PollFlags, poll};
use tokio::sync::{
    mpsc::{self, Permit},
    oneshot,
};

/// Pieces that may wait for the reader.
const WAITING: usize = 64;

/// Which of our streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    Stdout,
    Stderr,
}

/// A piece of output and where it goes.
pub type Piece = (Channel, Vec<u8>);

/// The reader of our output has gone, or writing failed; [`Sink::finish`] tells which.
#[derive(Debug)]
pub struct Stopped;

/// Handle to the writing thread.
#[derive(Debug)]
pub struct Sink {
    pieces: mpsc::Sender<Piece>,
    result: oneshot::Receiver<io::Result<()>>,
}

impl Sink {
    /// Starts the thread.
    pub fn start() -> Self {
        let (pieces, mut queue) = mpsc::channel::<Piece>(WAITING);
        let (report, result) = oneshot::channel();
        // Not joined: the thread may be stuck in a write that only the end of the process ends.
        thread::spawn(move || {
            let mut outcome = Ok(());
            while let Some((channel, bytes)) = queue.blocking_recv() {
                outcome = match channel {
                    Channel::Stdout => write_all(io::stdout().as_fd(), &bytes),
                    Channel::Stderr => write_all(io::stderr().as_fd(), &bytes),
                };
                if outcome.is_err() {
                    break;
                }
            }
            drop(queue);
            // The receiver is gone when the command was abandoned.
            let _ = report.send(outcome);
        });
        Self { pieces, result }
    }

    /// Waits for room for one piece. Safe to cancel.
    pub async fn room(&self) -> Result<Permit<'_, Piece>, Stopped> {
        self.pieces.reserve().await.map_err(|_| Stopped)
    }

    /// Waits until everything is written.
    pub async fn finish(self) -> io::Result<()> {
        drop(self.pieces);
        self.result.await.unwrap_or(Ok(()))
    }
}

fn write_all(fd: std::os::fd::BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    // Whatever std has buffered for this stream comes first.
    io::stdout().flush()?;
    while !bytes.is_empty() {
        match rustix::io::write(fd, bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(rustix::io::Errno::INTR) => {}
            // Our standard streams may share a file description that somebody made non-blocking.
            Err(rustix::io::Errno::AGAIN) => {
                poll(&mut [PollFd::new(&fd, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
