//! Reading: from an offset, piece by piece, each from the files: a slow reader holds nothing but its position.

use std::path::PathBuf;

use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{
    Progress, blocking,
    segment::{self, Piece},
};
use crate::ports::LogError;

/// How far to read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Until {
    /// What is there now.
    Now,
    /// Until the build ended.
    Sealed,
}

/// A reader of one log.
pub struct Follower {
    folder: PathBuf,
    position: u64,
    /// Where to stop, once that is known.
    end: Option<u64>,
    progress: watch::Receiver<Progress>,
    _place: Option<OwnedSemaphorePermit>,
}

impl Follower {
    pub(super) fn live(
        folder: PathBuf,
        from: u64,
        until: Until,
        progress: watch::Receiver<Progress>,
        place: OwnedSemaphorePermit,
    ) -> Self {
        let end = (until == Until::Now).then(|| progress.borrow().end);
        Self { folder, position: from, end, progress, _place: Some(place) }
    }

    pub(super) fn ended(folder: PathBuf, from: u64, end: u64) -> Self {
        let progress = watch::channel(Progress { end, sealed: true }).1;
        Self { folder, position: from, end: Some(end), progress, _place: None }
    }

    /// Where the next piece begins: what a reader that comes back asks for.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// The next piece, at most 64 KiB; waits for it when the log is followed. `None` at the end.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub async fn next(&mut self) -> Result<Option<Piece>, LogError> {
        loop {
            let progress = *self.progress.borrow_and_update();
            let end = self.end.unwrap_or(progress.end);
            if self.position < end {
                let (folder, position) = (self.folder.clone(), self.position);
                let piece = blocking(move || segment::piece_at(&folder, position, end)).await?;
                if let Some(piece) = piece {
                    self.position = piece.end();
                    return Ok(Some(piece));
                }
                return Ok(None);
            }
            if self.end.is_some() || progress.sealed {
                return Ok(None);
            }
            if self.progress.changed().await.is_err() {
                self.end = Some(self.progress.borrow().end);
            }
        }
    }
}
