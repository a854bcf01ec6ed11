//! Reading: from an offset, piece by piece: a slow reader holds nothing but its position and one batch. No file stays open, so that what is left
//! out of a log is gone from the disk.

use std::collections::VecDeque;

use tokio::sync::{OwnedSemaphorePermit, watch};

use super::{
    Progress, blocking,
    files::Files,
    read::{self, Place},
    segment::Piece,
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
    files: Files,
    position: u64,
    /// What was read and not yet given.
    ahead: VecDeque<Piece>,
    /// Where the next batch begins, when that is known.
    place: Option<Place>,
    /// Where to stop, once that is known.
    end: Option<u64>,
    progress: watch::Receiver<Progress>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Follower {
    pub(super) fn live(
        files: Files,
        from: u64,
        until: Until,
        progress: watch::Receiver<Progress>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        let end = (until == Until::Now).then(|| progress.borrow().end);
        Self {
            files,
            position: from,
            ahead: VecDeque::new(),
            place: None,
            end,
            progress,
            _permit: Some(permit),
        }
    }

    pub(super) fn ended(files: Files, from: u64, end: u64) -> Self {
        let progress = watch::channel(Progress { end, sealed: true }).1;
        Self {
            files,
            position: from,
            ahead: VecDeque::new(),
            place: None,
            end: Some(end),
            progress,
            _permit: None,
        }
    }

    /// Where the next piece begins: what a reader that comes back asks for.
    pub fn position(&self) -> u64 {
        self.position
    }

    /// Where the last lines begin of what is there now.
    pub(super) async fn tail_offset(&self, lines: usize) -> Result<u64, LogError> {
        let (files, end) = (self.files.clone(), self.end.unwrap_or(self.progress.borrow().end));
        blocking(move || read::tail_offset(&files, end, lines)).await
    }

    /// The next piece, at most 64 KiB; waits for it when the log is followed. `None` at the end.
    ///
    /// # Errors
    /// When the files cannot be read.
    pub async fn next(&mut self) -> Result<Option<Piece>, LogError> {
        loop {
            if let Some(piece) = self.ahead.pop_front() {
                self.position = piece.end();
                return Ok(Some(piece));
            }
            let progress = *self.progress.borrow_and_update();
            let end = self.end.unwrap_or(progress.end);
            if self.position < end {
                let (files, place, position) = (self.files.clone(), self.place, self.position);
                let batch = blocking(move || read::batch(&files, place, position, end)).await?;
                if batch.pieces.is_empty() {
                    return Ok(None);
                }
                self.place = batch.place;
                self.ahead = batch.pieces.into();
                continue;
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
