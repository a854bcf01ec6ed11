//! What accumulates on disk: folders of calls whose process was killed, and mirrors.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Git;

impl Git {
    /// Removes the private folders of calls that a killed process left, with their credentials. To be called at the start, before any
    /// other call.
    ///
    /// # Errors
    /// The scratch folder cannot be read, or a folder in it not removed.
    pub fn sweep_scratch(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.settings.scratch)? {
            let entry = entry?;
            if entry.file_type()?.is_dir()
                && entry.file_name().to_str().is_some_and(|name| name.starts_with("git-"))
            {
                fs::remove_dir_all(entry.path())?;
            }
        }
        Ok(())
    }

    /// Removes the mirrors that were not used for the longest time, until all together have at most `limit` bytes. One that is in use
    /// stays. Gives the bytes that are left. Blocks: it walks every mirror.
    ///
    /// # Errors
    /// The mirrors cannot be read, or one not removed.
    pub fn evict_mirrors(&self, limit: u64) -> io::Result<u64> {
        let mut mirrors = self.mirrors()?;
        mirrors.sort_by_key(|mirror| mirror.used);
        let mut left: u64 = mirrors.iter().map(|mirror| mirror.bytes).sum();
        for mirror in mirrors {
            if left <= limit {
                break;
            }
            let lock = OpenOptions::new()
                .create(true)
                .truncate(false)
                .write(true)
                .open(mirror.path.with_extension("lock"))?;
            if lock.try_lock().is_err() {
                continue;
            }
            // The lock file stays: another process may have it open already and would lock a file that is gone.
            fs::remove_dir_all(&mirror.path)?;
            left -= mirror.bytes;
        }
        Ok(left)
    }

    fn mirrors(&self) -> io::Result<Vec<Kept>> {
        let mut kept = Vec::new();
        let entries = match fs::read_dir(&self.settings.mirrors) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(kept),
            Err(error) => return Err(error),
        };
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "git") {
                // The lock's time is set at each use.
                let used = fs::metadata(path.with_extension("lock")).and_then(|lock| lock.modified());
                kept.push(Kept { used: used.unwrap_or(SystemTime::UNIX_EPOCH), bytes: size(&path)?, path });
            }
        }
        Ok(kept)
    }
}

struct Kept {
    path: PathBuf,
    used: SystemTime,
    bytes: u64,
}

/// Bytes of the files below a folder, which others may be changing meanwhile.
fn size(folder: &Path) -> io::Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let metadata = match entry.metadata() {
            Ok(metadata) => metadata,
            // A fetch in the other process has finished a pack.
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        bytes += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}
