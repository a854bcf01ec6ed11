//! Memory that outlives the worker: a file without a name, held by the supervisor and handed to each worker.
//!
//! Invariant: a section is complete at every moment. A worker may be killed between any two instructions, so content is written beside the
//! current one, and one write of eight bytes makes it current.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::MemfdFlags;

/// Room of a section's content, twice. Only what was written takes memory.
const ROOM: u64 = 32 << 20;
const SECTION: u64 = 2 * ROOM + HEADER;
const HEADER: u64 = 4096;

/// What is kept.
#[derive(Clone, Copy, Debug)]
pub enum Section {
    /// The policy that was accepted last.
    Policy,
    /// Names with the addresses that were given out for them.
    Names,
    Vault,
    /// The key and certificate of the intercepting authority.
    Authority,
    /// The rules that every connection was last judged by.
    Judged,
}

/// The file.
#[derive(Clone, Debug)]
pub struct State(Arc<File>);

/// One section of it.
#[derive(Clone, Debug)]
pub struct Kept {
    file: Arc<File>,
    start: u64,
}

impl State {
    /// A new, empty one.
    pub fn create() -> io::Result<Self> {
        let memory = rustix::fs::memfd_create("egress-state", MemfdFlags::CLOEXEC)?;
        Ok(Self(Arc::new(memory.into())))
    }

    pub fn section(&self, section: Section) -> Kept {
        Kept { file: self.0.clone(), start: section as u64 * SECTION }
    }
}

impl From<OwnedFd> for State {
    fn from(file: OwnedFd) -> Self {
        Self(Arc::new(file.into()))
    }
}

impl AsFd for State {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Kept {
    /// What was written last; empty if nothing was.
    pub fn read(&self) -> io::Result<Vec<u8>> {
        let (slot, length) = self.header()?;
        let mut content = vec![0; length as usize];
        self.file.read_exact_at(&mut content, self.slot(slot))?;
        Ok(content)
    }

    /// Puts this in place of everything.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        let (slot, _) = self.header()?;
        self.write(1 - slot, 0, content)
    }

    /// Adds this at the end, and tells how long the whole is now.
    pub fn append(&self, content: &[u8]) -> io::Result<u64> {
        let (slot, length) = self.header()?;
        self.write(slot, length, content)?;
        Ok(u64::from(length) + content.len() as u64)
    }

    fn write(&self, slot: u32, at: u32, content: &[u8]) -> io::Result<()> {
        let end = u64::from(at) + content.len() as u64;
        if end > ROOM {
            return Err(io::Error::new(io::ErrorKind::StorageFull, "more than a section has room for"));
        }
        self.file.write_all_at(content, self.slot(slot) + u64::from(at))?;
        let header = (u64::from(slot) << 32) | end;
        self.file.write_all_at(&header.to_ne_bytes(), self.start)
    }

    fn header(&self) -> io::Result<(u32, u32)> {
        let mut header = [0; 8];
        // Behind the end of the file nothing has been written yet.
        let read = self.file.read_at(&mut header, self.start)?;
        let header = if read == header.len() { u64::from_ne_bytes(header) } else { 0 };
        Ok(((header >> 32) as u32 & 1, header as u32))
    }

    fn slot(&self, slot: u32) -> u64 {
        self.start + HEADER + u64::from(slot) * ROOM
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_keep_their_own_content() {
        let state = State::create().unwrap();
        let (names, vault) = (state.section(Section::Names), state.section(Section::Vault));
        assert_eq!(names.read().unwrap(), b"");
        vault.replace(b"secret").unwrap();
        names.replace(b"one ").unwrap();
        assert_eq!(names.append(b"two").unwrap(), 7);
        assert_eq!(names.read().unwrap(), b"one two");
        names.replace(b"3").unwrap();
        assert_eq!(names.read().unwrap(), b"3");
        assert_eq!(vault.read().unwrap(), b"secret");
        assert!(state.section(Section::Authority).read().unwrap().is_empty());
    }

    #[test]
    fn what_is_too_long_leaves_the_old() {
        let names = State::create().unwrap().section(Section::Names);
        names.replace(b"old").unwrap();
        assert!(names.replace(&vec![0; ROOM as usize + 1]).is_err());
        assert_eq!(names.read().unwrap(), b"old");
    }
}
