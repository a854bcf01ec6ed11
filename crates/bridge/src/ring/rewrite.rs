//! All events written anew: to be rid of the dead bytes, or with other numbers.

use std::collections::HashMap;
use std::io;

use super::lines::renumbered;
use super::record::Header;
use super::segments::Place;
use super::{Body, Ring};

impl Ring {
    /// Moves what was pushed from `floor` on up by `by` numbers.
    pub(super) fn move_up(&mut self, floor: u64, by: u64) {
        if self.next > floor && self.rewrite(floor, by).is_err() {
            self.disk_failed = true;
        }
        self.next += by;
    }

    /// Writes all events into one file, those from `floor` on with numbers that are higher by `by`. If the disk fails the moved
    /// events are held in memory.
    pub(super) fn rewrite(&mut self, floor: u64, by: u64) -> io::Result<()> {
        let moved = |seq: u64| if seq >= floor { seq + by } else { seq };
        let mut renamed = Vec::with_capacity(self.kept.len());
        for (&seq, kept) in &self.kept {
            let json = match &kept.body {
                Body::Memory(json) => Ok(json.clone()),
                Body::Disk(place) => self.segments.read(*place),
            };
            // What cannot be read becomes a gap.
            let Ok(json) = json.and_then(|json| renumbered(seq, moved(seq), json)) else { continue };
            renamed.push((moved(seq), kept.class, kept.key.clone(), json));
        }
        let next = self.next + by;
        let header = Header { boot: self.boot.clone(), acked: self.acked, next, alone: true };
        let records =
            renamed.iter().map(|(seq, class, key, json)| (*seq, *class, key.as_deref(), json.clone()));
        let written = self.segments.rewrite(&header, records);
        if by == 0
            && let Err(error) = written
        {
            return Err(error);
        }
        let places: HashMap<u64, Place> =
            written.as_ref().map(|all| all.iter().copied().collect()).unwrap_or_default();
        for kept in std::mem::take(&mut self.kept).into_values() {
            if let (Err(_), Body::Disk(place)) = (&written, kept.body) {
                self.segments.release(place.segment);
            }
        }
        self.droppable.clear();
        self.newest_progress.clear();
        self.bytes = 0;
        for (seq, class, key, json) in renamed {
            let body = match places.get(&seq) {
                Some(place) => Body::Disk(*place),
                None => Body::Memory(json),
            };
            self.keep(seq, class, key, body);
        }
        written.map(|_| ())
    }
}
