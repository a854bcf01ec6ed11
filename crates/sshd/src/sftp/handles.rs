//! Open files and directories, and the names that the peer has for them.

use std::collections::HashMap;
use std::fs::File;

use rustix::fs::Dir;

/// At a time; what a client opens at once is at most a few dozen.
pub(super) const MAX_HANDLES: usize = 1024;

pub(super) enum Open {
    File(File),
    /// A listing that goes on where it stopped.
    Folder(Folder),
}

pub(super) struct Folder {
    pub listing: Dir,
    pub folder: File,
}

/// Numbers are never used twice, so that a late request cannot reach another file.
#[derive(Default)]
pub(super) struct Handles {
    open: HashMap<u64, Open>,
    next: u64,
}

impl Handles {
    /// None when there are too many.
    pub(super) fn insert(&mut self, open: Open) -> Option<[u8; 8]> {
        if self.open.len() >= MAX_HANDLES {
            return None;
        }
        self.next += 1;
        self.open.insert(self.next, open);
        Some(self.next.to_be_bytes())
    }

    pub(super) fn is_full(&self) -> bool {
        self.open.len() >= MAX_HANDLES
    }

    pub(super) fn file(&self, name: &[u8]) -> Option<&File> {
        match self.open.get(&number(name)?)? {
            Open::File(file) => Some(file),
            Open::Folder(_) => None,
        }
    }

    /// A directory can be asked for its attributes too.
    pub(super) fn either(&self, name: &[u8]) -> Option<&File> {
        match self.open.get(&number(name)?)? {
            Open::File(file) => Some(file),
            Open::Folder(folder) => Some(&folder.folder),
        }
    }

    pub(super) fn folder(&mut self, name: &[u8]) -> Option<&mut Folder> {
        match self.open.get_mut(&number(name)?)? {
            Open::Folder(folder) => Some(folder),
            Open::File(_) => None,
        }
    }

    pub(super) fn remove(&mut self, name: &[u8]) -> Option<Open> {
        self.open.remove(&number(name)?)
    }
}

fn number(name: &[u8]) -> Option<u64> {
    name.try_into().ok().map(u64::from_be_bytes)
}
