//! What a process writes: through the filter into its log, and the end of it into a tail.
//!
//! Invariant: nobody ever dies of writing. The pipes are read until their last writer is gone, whatever became of the process that was
//! started, and of whoever started it.

use std::io::{self, PipeReader, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::net::unix::pipe;
use tokio::sync::{mpsc, oneshot, watch};

use crate::clock::{Clock, Moment};
use crate::filter::FilterStream;
use crate::log::LogWriter;
use crate::ports::Ports;
use crate::tail::{Stream, Tail};

const READ: usize = 8 << 10;
/// What is taken over at the end of a process; a full pipe has less, and a writer that goes on must not hold us up.
const CATCH_UP: usize = 1 << 20;

/// The outputs of one process.
pub struct Capture {
    tail: Arc<Mutex<Tail>>,
    wrote: watch::Receiver<Moment>,
    readers: Vec<mpsc::Sender<oneshot::Sender<()>>>,
}

/// Whether the two outputs can be told apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outputs {
    /// They can, and what is written to one may be read before what was written to the other earlier.
    Apart,
    /// They cannot: one pipe takes both, in the order in which they are written.
    Together,
}

/// The ends that the process gets.
pub struct Writers {
    pub stdout: OwnedFd,
    pub stderr: OwnedFd,
}

impl Capture {
    /// Begins to read; without a source, nothing is kept but the tail.
    pub fn start(ports: &Ports, source: Option<&str>, outputs: Outputs) -> io::Result<(Capture, Writers)> {
        let tail = Arc::new(Mutex::new(Tail::default()));
        let (tell, wrote) = watch::channel(ports.clock.now());
        let log = source.map(|source| ports.logs.writer(source));
        let mut readers = Vec::with_capacity(2);
        let mut reader = |stream| -> io::Result<OwnedFd> {
            let (read, write) = io::pipe()?;
            let (ask, asked) = mpsc::channel(1);
            readers.push(ask);
            let reader = Reader {
                pipe: pipe::Receiver::from_owned_fd(read.into())?,
                stream,
                filter: ports.filter.stream(),
                passed: Vec::new(),
                tail: Arc::clone(&tail),
                log: log.clone(),
                clock: Arc::clone(&ports.clock),
                tell: tell.clone(),
            };
            tokio::spawn(reader.run(asked));
            Ok(write.into())
        };
        let stdout = reader(Stream::Stdout)?;
        let stderr = match outputs {
            Outputs::Apart => reader(Stream::Stderr)?,
            Outputs::Together => stdout.try_clone()?,
        };
        let writers = Writers { stdout, stderr };
        Ok((Capture { tail, wrote, readers }, writers))
    }

    /// When something was last written; changes with each piece of output.
    pub fn wrote(&self) -> watch::Receiver<Moment> {
        self.wrote.clone()
    }

    /// Takes over what waits in the pipes, so that a process which has ended is quoted to its end.
    pub async fn catch_up(&self) {
        for reader in &self.readers {
            let (done, caught_up) = oneshot::channel();
            // A reader that is gone has read everything.
            if reader.send(done).await.is_ok() {
                let _ = caught_up.await;
            }
        }
    }

    /// The end of what was written, for as long as somebody wants it.
    pub fn shared_tail(&self) -> SharedTail {
        SharedTail(Arc::clone(&self.tail))
    }

    pub fn tail(&self) -> MutexGuard<'_, Tail> {
        self.tail.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The end of an output that may still go on.
#[derive(Clone)]
pub struct SharedTail(Arc<Mutex<Tail>>);

impl SharedTail {
    pub fn text(&self) -> String {
        self.lock().text()
    }

    pub fn message(&self) -> Option<String> {
        self.lock().message()
    }

    fn lock(&self) -> MutexGuard<'_, Tail> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Reader {
    pipe: pipe::Receiver,
    stream: Stream,
    filter: Box<dyn FilterStream>,
    passed: Vec<u8>,
    tail: Arc<Mutex<Tail>>,
    log: Option<LogWriter>,
    clock: Arc<dyn Clock>,
    tell: watch::Sender<Moment>,
}

impl Reader {
    async fn run(mut self, mut asked: mpsc::Receiver<oneshot::Sender<()>>) {
        let mut buffer = vec![0; READ];
        loop {
            tokio::select! {
                ready = self.pipe.readable() => {
                    let read = match ready {
                        Ok(()) => self.pipe.try_read(&mut buffer),
                        Err(error) => Err(error),
                    };
                    match read {
                        Ok(0) => break,
                        Ok(count) => self.take(&buffer[..count]),
                        Err(error) if is_passing(&error) => {}
                        Err(_) => break,
                    }
                    // A pipe that is never empty would keep the thread.
                    tokio::task::yield_now().await;
                }
                Some(done) = asked.recv() => {
                    self.drain(&mut buffer);
                    let _ = done.send(());
                }
            }
        }
        let Reader { filter, passed, .. } = &mut self;
        filter.finish(passed);
        self.pass_on();
    }

    /// Reads what is there, of which the runtime may not know yet but the kernel does.
    fn drain(&mut self, buffer: &mut [u8]) {
        let Ok(fd) = self.pipe.as_fd().try_clone_to_owned() else { return };
        let mut direct = PipeReader::from(fd);
        let mut taken = 0;
        while taken < CATCH_UP {
            match direct.read(buffer) {
                Ok(0) => return,
                Ok(count) => {
                    self.take(&buffer[..count]);
                    taken += count;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn take(&mut self, bytes: &[u8]) {
        self.filter.push(bytes, &mut self.passed);
        self.pass_on();
        self.tell.send_replace(self.clock.now());
    }

    fn pass_on(&mut self) {
        if self.passed.is_empty() {
            return;
        }
        self.tail.lock().unwrap_or_else(PoisonError::into_inner).push(self.stream, &self.passed);
        if let Some(log) = &self.log {
            log.append(self.stream, &self.passed, self.clock.wall());
        }
        self.passed.clear();
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}
