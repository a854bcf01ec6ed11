//! How much of the disk one repository may take. Git has no limit of its own, neither for what a remote sends nor for what it unpacks:
//! a few kilobytes can name a file of terabytes, or the same folder a thousand million times.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

/// Between two looks. What is written in the meantime is what a repository can be too large by.
const LOOK: Duration = Duration::from_millis(500);
/// How many times as long as a look took the next one waits: many files take git longer as well.
const REST: u32 = 3;
/// What an entry takes at least, so that empty files and folders cannot be too many.
const ENTRY: u64 = 4096;

/// Where downloads go, in a bare repository and in a checkout.
const DOWNLOADS: &[&str] = &["objects", ".git/objects", ".git/modules", ".git/lfs"];

/// What is measured of a folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Downloads,
    Everything,
}

/// What may not become too large while git runs.
#[derive(Debug, Clone, Copy)]
pub(super) struct Watched<'a> {
    folder: &'a Path,
    part: Part,
}

impl<'a> Watched<'a> {
    pub(super) fn downloads(folder: &'a Path) -> Self {
        Self { folder, part: Part::Downloads }
    }

    /// Everything in a folder that a checkout is about to fill. Where something is in it already, that belongs to somebody else who may
    /// fill the disk in other ways: then the downloads alone.
    pub(super) fn of_checkout(folder: &'a Path) -> Self {
        let empty = fs::read_dir(folder).is_ok_and(|mut entries| entries.next().is_none());
        Self { folder, part: if empty { Part::Everything } else { Part::Downloads } }
    }

    /// The same if it is everything; the downloads are of no interest to a call that downloads nothing.
    pub(super) fn everything(self) -> Option<Self> {
        (self.part == Part::Everything).then_some(self)
    }

    /// Whether it takes more than this many bytes. What cannot be read takes none: git says what is wrong.
    pub(super) async fn exceeds(self, limit: u64) -> bool {
        let folders = match self.part {
            Part::Downloads => DOWNLOADS.iter().map(|path| self.folder.join(path)).collect(),
            Part::Everything => vec![self.folder.to_owned()],
        };
        let cancel = CancellationToken::new();
        // Whoever does not wait for the answer any more ends the walk.
        let _end = cancel.clone().drop_guard();
        tokio::task::spawn_blocking(move || exceeded(folders, limit, &cancel)).await.unwrap_or(false)
    }

    /// Ends when it has become more than this many bytes.
    pub(super) async fn outgrows(self, limit: u64) {
        let mut pause = LOOK;
        loop {
            sleep(pause).await;
            let begun = Instant::now();
            if self.exceeds(limit).await {
                return;
            }
            pause = LOOK.max(begun.elapsed() * REST);
        }
    }
}

/// Looks at no more entries than the limit has room for. Others may be changing the folders meanwhile.
fn exceeded(mut folders: Vec<PathBuf>, limit: u64, cancel: &CancellationToken) -> bool {
    let mut left = limit;
    while let Some(folder) = folders.pop() {
        if cancel.is_cancelled() {
            return false;
        }
        let Ok(entries) = fs::read_dir(folder) else { continue };
        for entry in entries.map_while(Result::ok) {
            let Ok(metadata) = entry.metadata() else { continue };
            let bytes = if metadata.is_dir() {
                folders.push(entry.path());
                ENTRY
            } else {
                metadata.len().max(ENTRY)
            };
            match left.checked_sub(bytes) {
                Some(rest) => left = rest,
                None => return true,
            }
        }
    }
    false
}
