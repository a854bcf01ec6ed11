//! The output of a background command: a ring in an unlinked file, addressed by byte offset.
//!
//! The file has no name, so nothing is left behind however the box ends. Offsets count every byte ever written;
//! beyond the capacity the oldest bytes go, and a reader that asks for them starts at the oldest kept one.
//! Invariant: what is returned for an offset is what was written at it, or the answer is cut short.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rustix::fs::{MemfdFlags, Mode, OFlags};
use tokio::net::unix::pipe;

use super::pipes::{self, Read};
use crate::http::body::Body;

const ON_DISK: u64 = 64 << 20;
/// Memory of the box, charged to its limit.
const IN_MEMORY: u64 = 8 << 20;
const CHUNK: u64 = 64 << 10;

pub(crate) struct Log {
    file: File,
    capacity: u64,
    kept: Mutex<Kept>,
    /// Until the last writer is gone.
    source: Mutex<Option<Arc<pipe::Receiver>>>,
}

/// The retained range of offsets.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    start: u64,
    end: u64,
}

impl Log {
    /// Memory that the output takes; none when it is on a disk.
    pub(super) fn memory(&self) -> usize {
        let on_disk = self.capacity != IN_MEMORY;
        if on_disk { 0 } else { usize::try_from(self.lock().end.min(IN_MEMORY)).unwrap_or(0) }
    }

    pub(crate) fn create(tmp: &Path) -> io::Result<Self> {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let (fd, capacity) = match rustix::fs::open(tmp, flags, Mode::RUSR | Mode::WUSR) {
            Ok(fd) => (fd, ON_DISK),
            // No such directory, read-only, or a file system without unnamed files.
            Err(_) => (rustix::fs::memfd_create("command-log", MemfdFlags::CLOEXEC)?, IN_MEMORY),
        };
        Ok(Log { file: File::from(fd), capacity, kept: Mutex::default(), source: Mutex::default() })
    }

    fn append(&self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let at = self.lock().end;
            let offset = at % self.capacity;
            let room = usize::try_from(self.capacity - offset).unwrap_or(usize::MAX);
            let (piece, rest) = bytes.split_at(bytes.len().min(room));
            let end = at + piece.len() as u64;
            {
                // Readers must not trust bytes that are about to be overwritten.
                let mut kept = self.lock();
                kept.start = kept.start.max(end.saturating_sub(self.capacity));
            }
            let written = self.file.write_all_at(piece, offset);
            let mut kept = self.lock();
            kept.end = end;
            if written.is_err() {
                // A full disk loses output, truthfully: the offsets move on and the lost ones are not served.
                kept.start = end;
            }
            bytes = rest;
        }
    }

    /// Takes over what is waiting in the pipe, so that a reader sees all that a process wrote before it ended.
    pub(crate) fn catch_up(&self) {
        let Some(pipe) = self.source().clone() else { return };
        // As many reads as a full pipe holds; a writer that is faster than this must not hold up the reader.
        for _ in 0..8 {
            if !matches!(pipes::try_read(&pipe, |bytes| self.append(bytes)), Read::Some(_)) {
                return;
            }
        }
    }

    /// The offsets to serve for a cursor.
    pub(crate) fn range(&self, cursor: u64) -> (u64, u64) {
        let kept = *self.lock();
        (cursor.max(kept.start).min(kept.end.max(cursor)), kept.end)
    }

    /// Reads at most a chunk at an offset; `None` when it is no longer kept.
    fn read(&self, from: u64, end: u64) -> io::Result<Option<Vec<u8>>> {
        let offset = from % self.capacity;
        let len = (end - from).min(CHUNK).min(self.capacity - offset);
        let mut buffer = vec![0; usize::try_from(len).unwrap_or(0)];
        self.file.read_exact_at(&mut buffer, offset)?;
        // Checked after the read: the writer moves the start before it overwrites.
        Ok((self.lock().start <= from).then_some(buffer))
    }

    pub(crate) fn body(log: Arc<Log>, from: u64, end: u64) -> Body {
        let (tx, body) = Body::channel(2, Some(end - from));
        tokio::spawn(async move {
            let mut at = from;
            while at < end {
                let chunk = match log.read(at, end) {
                    Ok(Some(chunk)) => Ok(chunk),
                    Ok(None) => Err(io::Error::other("the output was overwritten while it was read")),
                    Err(error) => Err(error),
                };
                at += chunk.as_ref().map_or(end, |c| c.len() as u64);
                if tx.send(chunk.map(Bytes::from)).await.is_err() {
                    return;
                }
            }
        });
        body
    }

    fn source(&self) -> MutexGuard<'_, Option<Arc<pipe::Receiver>>> {
        self.source.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Kept> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Copies a background command's output into its log until the last writer is gone.
pub(crate) async fn fill(log: Arc<Log>, pipe: pipe::Receiver) {
    let pipe = Arc::new(pipe);
    *log.source() = Some(Arc::clone(&pipe));
    while pipe.readable().await.is_ok() {
        if matches!(pipes::try_read(&pipe, |bytes| log.append(bytes)), Read::End) {
            break;
        }
        // A pipe that is never empty would keep the thread.
        tokio::task::yield_now().await;
    }
    // A command that has ended keeps its output, not its descriptor.
    *log.source() = None;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(log: &Log, from: u64) -> Vec<u8> {
        let (mut at, end) = log.range(from);
        let mut bytes = Vec::new();
        while at < end {
            let chunk = log.read(at, end).unwrap().unwrap();
            at += chunk.len() as u64;
            bytes.extend(chunk);
        }
        bytes
    }

    #[test]
    fn old_bytes_go_and_offsets_stay_true() {
        let mut log = Log::create(&std::env::temp_dir()).unwrap();
        log.capacity = 10;
        log.append(b"0123456");
        assert_eq!(all(&log, 0), b"0123456");
        assert_eq!(all(&log, 5), b"56");
        assert_eq!(log.range(99), (99, 7));
        log.append(b"789abcdef");
        assert_eq!(log.range(0), (6, 16));
        assert_eq!(all(&log, 0), b"6789abcdef");
        assert_eq!(all(&log, 12), b"cdef");
        assert_eq!(log.read(5, 16).unwrap(), None);
    }

    #[test]
    fn a_missing_directory_falls_back_to_memory() {
        let log = Log::create(Path::new("/proc/nonexistent")).unwrap();
        assert_eq!(log.capacity, IN_MEMORY);
    }
}
