//! Build logs on disk: appended with offsets, kept to a bounded size by leaving out the middle, followed by any number of bounded readers.
//!
//! Owns the files under its folder, one folder a build. Does not own what must not be stored: that was filtered before.
//!
//! Invariants: an offset is a position in everything that was ever written, whatever was left out since; what is there after a crash is a
//! beginning of what was written, cut between two records.

mod files;
mod follow;
mod read;
mod segment;
mod writer;

use std::{
    collections::HashMap,
    io,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use async_trait::async_trait;
use sandglass_sandbox::{Clock, ImageBuildId};
use tokio::sync::{Semaphore, watch};

use crate::{
    build::StepName,
    ports::{LogError, LogSink, Logs},
};
pub use files::Cost;
use files::{Files, Meter};
pub use follow::{Follower, Until};
pub use segment::Piece;
use writer::Writer;

/// Lines at the end of a failed build's log that go with its cause.
pub const TAIL_LINES: usize = 200;
/// Bytes of them.
pub const TAIL_BYTES: usize = 8 * 1024;

/// How much is kept of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of output kept from the beginning.
    pub head: u64,
    /// Bytes of output kept from the end, at most; at least seven eighths of it.
    pub tail: u64,
    /// Followers of one build at a time.
    pub followers: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { head: 8 << 20, tail: 8 << 20, followers: 64 }
    }
}

/// The logs of all builds, in a folder.
pub struct DiskLogs {
    root: PathBuf,
    limits: Limits,
    clock: Arc<dyn Clock>,
    /// Logs of builds that have not ended.
    open: Mutex<HashMap<ImageBuildId, Arc<Journal>>>,
    /// Held while a log is opened: the second of two writers would cut off what the first one is writing.
    opening: tokio::sync::Mutex<()>,
    meter: Arc<Meter>,
}

/// One log that may still grow.
pub(crate) struct Journal {
    /// `None` once nobody may write.
    writer: Mutex<Option<Writer>>,
    progress: watch::Sender<Progress>,
    followers: Arc<Semaphore>,
    clock: Arc<dyn Clock>,
}

/// How far a log is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    pub(crate) end: u64,
    pub(crate) sealed: bool,
}

impl DiskLogs {
    /// Logs under `root`, which is made when the first one is opened.
    pub fn new(root: PathBuf, limits: Limits, clock: Arc<dyn Clock>) -> Self {
        let (open, opening, meter) = (Mutex::default(), tokio::sync::Mutex::default(), Arc::default());
        Self { root, limits, clock, open, opening, meter }
    }

    fn opened(&self) -> MutexGuard<'_, HashMap<ImageBuildId, Arc<Journal>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn folder(&self, build: ImageBuildId) -> PathBuf {
        self.root.join(build.to_string())
    }

    fn files(&self, build: ImageBuildId) -> Files {
        Files::new(self.folder(build), self.meter.clone())
    }

    /// What all readers took from the disk so far: a reader that takes much more than it gives is at fault, however fast the disk is.
    pub fn cost(&self) -> Cost {
        self.meter.cost()
    }

    /// Bytes that were ever written.
    ///
    /// # Errors
    /// When the folder cannot be read.
    pub async fn length(&self, build: ImageBuildId) -> Result<u64, LogError> {
        if let Some(journal) = self.opened().get(&build) {
            return Ok(journal.progress.borrow().end);
        }
        let files = self.files(build);
        blocking(move || files.end()).await
    }

    /// Reads from an offset. A log whose build has not ended is followed until it did, if that is wanted.
    ///
    /// # Errors
    /// [`LogError::NotFound`] when there is no log, [`LogError::Busy`] when too many follow it.
    pub async fn follow(&self, build: ImageBuildId, from: u64, until: Until) -> Result<Follower, LogError> {
        let journal = self.opened().get(&build).cloned();
        let files = self.files(build);
        match journal {
            Some(journal) => {
                let place = journal.followers.clone().try_acquire_owned().map_err(|_| LogError::Busy)?;
                Ok(Follower::live(files, from, until, journal.progress.subscribe(), place))
            }
            None if tokio::fs::try_exists(files.folder()).await? => {
                Ok(Follower::ended(files, from, self.length(build).await?))
            }
            None => Err(LogError::NotFound),
        }
    }

    /// The offset at which the last `lines` lines begin.
    ///
    /// # Errors
    /// As [`Self::follow`].
    pub async fn tail_offset(&self, build: ImageBuildId, lines: usize) -> Result<u64, LogError> {
        // Has a place among the followers, and knows where the log ends.
        let follower = self.follow(build, 0, Until::Now).await?;
        follower.tail_offset(lines).await
    }
}

#[async_trait]
impl Logs for DiskLogs {
    async fn open(&self, build: ImageBuildId) -> Result<Arc<dyn LogSink>, LogError> {
        let _opening = self.opening.lock().await;
        if let Some(journal) = self.opened().get(&build) {
            return Ok(Arc::new(Sink(journal.clone())));
        }
        let (files, limits) = (self.files(build), self.limits);
        let writer = blocking(move || Writer::open(files, limits)).await?;
        let progress = Progress { end: writer.end(), sealed: false };
        let journal = Arc::new(Journal {
            writer: Mutex::new(Some(writer)),
            progress: watch::channel(progress).0,
            followers: Arc::new(Semaphore::new(self.limits.followers)),
            clock: self.clock.clone(),
        });
        self.opened().insert(build, journal.clone());
        Ok(Arc::new(Sink(journal)))
    }

    async fn tail(&self, build: ImageBuildId) -> Result<String, LogError> {
        let end = self.length(build).await?;
        let from = end.saturating_sub(TAIL_BYTES as u64);
        let mut follower = match self.follow(build, from, Until::Now).await {
            Ok(follower) => follower,
            Err(LogError::NotFound) => return Ok(String::new()),
            Err(error) => return Err(error),
        };
        let mut bytes = Vec::new();
        while let Some(piece) = follower.next().await? {
            if let Piece::Output { bytes: output, .. } = piece {
                bytes.extend_from_slice(&output);
            }
        }
        Ok(last_lines(&bytes, from > 0))
    }

    async fn seal(&self, build: ImageBuildId) -> Result<(), LogError> {
        let Some(journal) = self.opened().remove(&build) else { return Ok(()) };
        blocking(move || journal.seal()).await
    }

    async fn remove(&self, build: ImageBuildId) -> Result<(), LogError> {
        self.seal(build).await?;
        match tokio::fs::remove_dir_all(self.folder(build)).await {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

impl Journal {
    fn append(&self, step: StepName, chunk: &[u8]) -> io::Result<()> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        // What comes after the end of its build has no readers.
        let Some(writer) = writer.as_mut() else { return Ok(()) };
        let appended = writer.append(step, self.clock.now(), chunk);
        let end = writer.end();
        self.progress.send_modify(|progress| progress.end = end);
        appended
    }

    fn seal(&self) -> io::Result<()> {
        let writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner).take();
        let synced = writer.map_or(Ok(()), |writer| writer.sync());
        self.progress.send_modify(|progress| progress.sealed = true);
        synced
    }
}

/// A writer's side of a log.
struct Sink(Arc<Journal>);

#[async_trait]
impl LogSink for Sink {
    async fn write(&self, step: StepName, chunk: &[u8]) {
        let (journal, chunk) = (self.0.clone(), chunk.to_vec());
        if let Err(error) = blocking(move || journal.append(step, &chunk)).await {
            tracing::warn!(%error, "a part of a build's log is lost");
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, LogError> {
    let done = tokio::task::spawn_blocking(work).await;
    Ok(done.map_err(io::Error::other)??)
}

/// The last lines as text, at most [`TAIL_LINES`] and [`TAIL_BYTES`]. `cut` says that something came before: then the first line is a part.
pub fn last_lines(bytes: &[u8], cut: bool) -> String {
    let start = bytes.len().saturating_sub(TAIL_BYTES);
    let (bytes, cut) = (&bytes[start..], cut || start > 0);
    let whole = match bytes.iter().position(|b| *b == b'\n') {
        Some(at) if cut && at + 1 < bytes.len() => &bytes[at + 1..],
        _ => bytes,
    };
    let text = String::from_utf8_lossy(whole);
    let lines: Vec<&str> = text.split_inclusive('\n').collect();
    let mut text = lines[lines.len().saturating_sub(TAIL_LINES)..].concat();
    // Bytes that are no text grow when they are replaced.
    let mut from = text.len().saturating_sub(TAIL_BYTES);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    text.split_off(from)
}
