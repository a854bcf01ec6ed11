//! How much of the disk one repository may take. Git has no limit of its own for what a remote sends.

use std::path::Path;
use std::time::Duration;

use super::housekeeping::size;

/// Between two looks. What comes over in the meantime is what a repository can be too large by.
const LOOK: Duration = Duration::from_millis(500);

/// Where downloads go, in a bare repository and in a checkout.
const DOWNLOADS: &[&str] = &["objects", ".git/objects", ".git/modules", ".git/lfs"];

/// Whether the downloads in a folder are more than this many bytes. A folder that cannot be read has none: git says what is wrong.
pub(super) fn exceeded(folder: &Path, limit: u64) -> bool {
    let bytes = DOWNLOADS.iter().map(|path| size(&folder.join(path)).unwrap_or(0));
    bytes.fold(0, u64::saturating_add) > limit
}

/// Ends when the downloads in a folder have become more than this many bytes; never without a limit.
pub(super) async fn watch(folder: &Path, limit: Option<u64>) {
    let Some(limit) = limit else { return std::future::pending().await };
    loop {
        tokio::time::sleep(LOOK).await;
        if exceeded(folder, limit) {
            return;
        }
    }
}
