//! Locks that hold between processes, and temporary directories that do not outlive theirs.
//!
//! Invariant: everything under the store's `tmp/` belongs to whoever holds the lock on it. A directory there that can
//! be locked was left by a crash and may be removed.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::FlockOperation;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use crate::error::ImageError;
use crate::image::ImageDigest;

const POLL: Duration = Duration::from_millis(20);
const PINS: &str = "pins.json";

/// A lock file, removed when the lock is given up.
#[derive(Debug)]
pub(crate) struct FileLock {
    path: PathBuf,
    _file: File,
}

impl FileLock {
    /// Takes the lock unless somebody has it, in this process or another.
    pub(crate) fn try_acquire(path: &Path) -> Result<Option<Self>, ImageError> {
        let failed = |e: io::Error| ImageError::io(format!("locking {}", path.display()), e);
        loop {
            let file = File::options().create(true).append(true).open(path).map_err(failed)?;
            match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => {}
                Err(Errno::WOULDBLOCK) => return Ok(None),
                Err(e) => return Err(failed(e.into())),
            }
            if still_named(&file, path).map_err(failed)? {
                return Ok(Some(Self { path: path.to_owned(), _file: file }));
            }
        }
    }

    /// Waits for the lock, blocking the thread.
    pub(crate) fn acquire_blocking(path: &Path) -> Result<Self, ImageError> {
        loop {
            if let Some(lock) = Self::try_acquire(path)? {
                return Ok(lock);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Waits for the lock.
    pub(crate) async fn acquire(path: &Path) -> Result<Self, ImageError> {
        loop {
            if let Some(lock) = Self::try_acquire(path)? {
                return Ok(lock);
            }
            tokio::time::sleep(POLL).await;
        }
    }
}

impl Drop for FileLock {
    fn drop(&mut self) {
        // While it is still held: whoever opened the same file meanwhile finds it unnamed, and starts over.
        let _ = fs::remove_file(&self.path);
    }
}

/// Says whether `path` still leads to the open file, or was replaced between opening and locking.
fn still_named(file: &File, path: &Path) -> io::Result<bool> {
    let ours = file.metadata()?;
    match fs::symlink_metadata(path) {
        Ok(named) => Ok(named.ino() == ours.ino() && named.dev() == ours.dev()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(e) => Err(e),
    }
}

/// Waits for the lock on a file that stays.
pub(crate) fn lock_permanent(path: &Path) -> Result<File, ImageError> {
    let failed = |e: io::Error| ImageError::io(format!("locking {}", path.display()), e);
    let file = File::options().create(true).append(true).open(path).map_err(failed)?;
    rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))
        .map_err(|e| failed(e.into()))?;
    Ok(file)
}

/// What an unfinished operation needs, and a garbage collection must leave.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pins {
    pub(crate) layers: Vec<ImageDigest>,
}

/// A temporary directory of one operation.
#[derive(Debug)]
pub(crate) struct Workspace {
    dir: PathBuf,
    _lock: File,
}

impl Workspace {
    pub(crate) fn create(tmp: &Path) -> Result<Self, ImageError> {
        let failed = |e: io::Error| ImageError::io("making a temporary directory", e);
        loop {
            let dir = tempfile::Builder::new().prefix("work-").tempdir_in(tmp).map_err(failed)?;
            let lock = match File::open(dir.path()) {
                // A cleaner has removed it already.
                Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                other => other.map_err(failed)?,
            };
            match rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive) {
                // A cleaner took it in the moment before: it is as good as gone.
                Err(Errno::WOULDBLOCK) => continue,
                other => other.map_err(|e| failed(e.into()))?,
            }
            if still_named(&lock, dir.path()).map_err(failed)? {
                return Ok(Self { dir: dir.keep(), _lock: lock });
            }
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.dir
    }

    /// Tells collectors what to leave. To be called with the index locked.
    pub(crate) fn pin(&self, pins: &Pins) -> Result<(), ImageError> {
        let text = serde_json::to_vec(pins).expect("digests are plain text");
        fs::write(self.dir.join(PINS), text).map_err(|e| ImageError::io("writing pins", e))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.dir) {
            tracing::warn!(%error, dir = %self.dir.display(), "a temporary image directory could not be removed");
        }
    }
}

/// Removes what crashed operations left.
pub(crate) fn remove_abandoned(tmp: &Path) -> Result<(), ImageError> {
    for (path, lock) in unlocked(tmp)? {
        if let Err(error) = fs::remove_dir_all(&path) {
            tracing::warn!(%error, path = %path.display(), "an abandoned image directory could not be removed");
        }
        drop(lock);
    }
    Ok(())
}

/// Removes lock files nobody holds.
pub(crate) fn remove_unheld(locks: &Path) -> Result<(), ImageError> {
    for path in children(locks)? {
        drop(FileLock::try_acquire(&path)?);
    }
    Ok(())
}

/// Reads what running operations need.
pub(crate) fn live_pins(tmp: &Path) -> Result<Pins, ImageError> {
    let mut all = Pins::default();
    for path in children(tmp)? {
        // Those of a crashed operation are harmless until it is cleaned up.
        match fs::read(path.join(PINS)) {
            Ok(text) => all.layers.extend(serde_json::from_slice::<Pins>(&text).unwrap_or_default().layers),
            Err(e) if matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
            Err(e) => return Err(ImageError::io("reading pins", e)),
        }
    }
    Ok(all)
}

fn children(tmp: &Path) -> Result<Vec<PathBuf>, ImageError> {
    let failed = |e: io::Error| ImageError::io(format!("reading {}", tmp.display()), e);
    fs::read_dir(tmp).map_err(failed)?.map(|entry| entry.map(|e| e.path()).map_err(failed)).collect()
}

fn unlocked(tmp: &Path) -> Result<Vec<(PathBuf, File)>, ImageError> {
    let mut found = Vec::new();
    for path in children(tmp)? {
        // It may be gone by now.
        let Ok(lock) = File::open(&path) else { continue };
        if rustix::fs::flock(&lock, FlockOperation::NonBlockingLockExclusive).is_ok() {
            found.push((path, lock));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_abandoned_directories_are_removed() {
        let tmp = tempfile::tempdir().unwrap();
        let live = Workspace::create(tmp.path()).unwrap();
        fs::create_dir_all(tmp.path().join("work-dead/x")).unwrap();
        remove_abandoned(tmp.path()).unwrap();
        assert!(live.path().exists());
        assert!(!tmp.path().join("work-dead").exists());
    }

    #[test]
    fn a_lock_is_exclusive_within_a_process_too() {
        let tmp = tempfile::tempdir().unwrap();
        let path = tmp.path().join("l");
        let held = FileLock::try_acquire(&path).unwrap().unwrap();
        assert!(FileLock::try_acquire(&path).unwrap().is_none());
        drop(held);
        assert!(!path.exists());
        assert!(FileLock::try_acquire(&path).unwrap().is_some());
    }
}
