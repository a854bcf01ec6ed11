//! All logs of a box under one budget.

use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sandglass_sandbox::Timestamp;
use tokio::sync::watch;

use super::source::{SourceLog, folder_of, source_in};
use crate::tail::Stream;

/// The output of more sources than this is not kept.
pub const MAX_SOURCES: usize = 64;

/// Bounds on what is kept, in bytes of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One file. The oldest output goes a file at a time.
    pub segment: u64,
    pub per_source: u64,
    pub total: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { segment: 256 << 10, per_source: 4 << 20, total: 32 << 20 }
    }
}

impl Limits {
    /// With files so small that the files which grow stay below the total by themselves.
    fn fitted(self) -> Self {
        let segment = self.segment.min(self.total / (MAX_SOURCES as u64 + 1)).max(1 << 10);
        Limits { segment, per_source: self.per_source.max(segment), ..self }
    }
}

/// A piece of output.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub source: String,
    pub stream: Stream,
    /// Of the first byte of `data`.
    pub offset: u64,
    pub time: Timestamp,
    pub data: Vec<u8>,
}

/// The offsets of a source: the oldest one that is kept, and the one that comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    pub oldest: u64,
    pub end: u64,
}

/// What one read found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// In order. A gap before a frame is output that is lost.
    pub frames: Vec<Frame>,
    /// Where to read on.
    pub next: u64,
    pub extent: Extent,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("there is no log of \"{0}\"")]
    NotFound(String),
    #[error("the log folder {path} cannot be used: {source}")]
    Folder { path: PathBuf, source: io::Error },
    #[error("the log of \"{source_name}\" cannot be read: {source}")]
    Read { source_name: String, source: io::Error },
}

/// The logs of a box; clones are the same logs.
#[derive(Clone)]
pub struct Logs {
    /// None when nothing is kept.
    store: Option<Arc<Mutex<Store>>>,
    changes: watch::Sender<u64>,
}

struct Store {
    root: PathBuf,
    limits: Limits,
    sources: BTreeMap<String, SourceLog>,
}

impl Logs {
    /// Opens the logs in a folder that is the agent's own, and takes up what is there.
    pub fn open(root: &Path, limits: Limits) -> Result<Logs, LogError> {
        let wrong = |source| LogError::Folder { path: root.to_owned(), source };
        DirBuilder::new().recursive(true).mode(0o700).create(root).map_err(wrong)?;
        let mut sources = BTreeMap::new();
        for entry in fs::read_dir(root).map_err(wrong)?.flatten() {
            let name = entry.file_name();
            let Some(source) = name.to_str().and_then(source_in) else { continue };
            // One that cannot be opened costs nobody else's.
            if sources.len() < MAX_SOURCES
                && entry.path().is_dir()
                && let Ok(log) = SourceLog::open(entry.path())
            {
                sources.insert(source, log);
            }
        }
        let mut store = Store { root: root.to_owned(), limits: limits.fitted(), sources };
        store.make_room();
        Ok(Logs { store: Some(Arc::new(Mutex::new(store))), changes: watch::Sender::new(0) })
    }

    /// Keeps nothing, where there is no folder to keep it in.
    pub fn nowhere() -> Logs {
        Logs { store: None, changes: watch::Sender::new(0) }
    }

    /// For the output of one source; several writers of a source write to one log.
    pub fn writer(&self, source: &str) -> LogWriter {
        LogWriter { logs: self.clone(), source: source.into() }
    }

    pub fn sources(&self) -> Vec<String> {
        self.lock().map_or_else(Vec::new, |store| store.sources.keys().cloned().collect())
    }

    pub fn extent(&self, source: &str) -> Option<Extent> {
        Some(self.lock()?.sources.get(source)?.extent())
    }

    /// Bytes that all files take.
    pub fn size(&self) -> u64 {
        self.lock().map_or(0, |store| store.size())
    }

    /// Frames of about `most` bytes together, from an offset on; at the oldest kept one if that is gone.
    pub fn read(&self, source: &str, from: u64, most: usize) -> Result<Batch, LogError> {
        let missing = || LogError::NotFound(source.to_owned());
        let store = self.lock().ok_or_else(missing)?;
        let log = store.sources.get(source).ok_or_else(missing)?;
        let frames = log
            .read(source, from, most)
            .map_err(|error| LogError::Read { source_name: source.to_owned(), source: error })?;
        let extent = log.extent();
        let read_to = frames.last().map(|frame| frame.offset + frame.data.len() as u64);
        // A reader that is ahead (a log that was begun anew) is brought back to the end.
        Ok(Batch { next: read_to.unwrap_or(extent.end), frames, extent })
    }

    /// Changes whenever there may be more to read.
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    fn append(&self, source: &str, stream: Stream, bytes: &[u8], time: Timestamp) {
        if bytes.is_empty() {
            return;
        }
        if let Some(mut store) = self.lock() {
            store.append(source, stream, bytes, time);
        }
        self.changes.send_modify(|count| *count = count.wrapping_add(1));
    }

    fn lock(&self) -> Option<MutexGuard<'_, Store>> {
        self.store.as_ref().map(|store| store.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Store {
    fn append(&mut self, source: &str, stream: Stream, bytes: &[u8], time: Timestamp) {
        if !self.sources.contains_key(source) {
            if self.sources.len() == MAX_SOURCES {
                return;
            }
            // Without a folder there is no log; the next output tries again.
            let Ok(log) = SourceLog::open(folder_of(&self.root, source)) else { return };
            self.sources.insert(source.to_owned(), log);
        }
        if let Some(log) = self.sources.get_mut(source) {
            log.append(stream, bytes, time, self.limits.segment);
            while log.size() > self.limits.per_source && log.drop_oldest() {}
        }
        self.make_room();
    }

    fn make_room(&mut self) {
        while self.size() > self.limits.total {
            let largest = self.sources.values_mut().filter(|log| log.has_old()).max_by_key(|log| log.size());
            if !largest.is_some_and(SourceLog::drop_oldest) {
                return;
            }
        }
    }

    fn size(&self) -> u64 {
        self.sources.values().map(SourceLog::size).sum()
    }
}

/// Writes to the log of one source.
#[derive(Clone)]
pub struct LogWriter {
    logs: Logs,
    source: Arc<str>,
}

impl LogWriter {
    /// Adds output. It never fails: what cannot be kept is a gap.
    pub fn append(&self, stream: Stream, bytes: &[u8], time: Timestamp) {
        self.logs.append(&self.source, stream, bytes, time);
    }
}

#[cfg(test)]
#[path = "tests.rs"]
mod tests;
