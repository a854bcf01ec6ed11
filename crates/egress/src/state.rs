//! Memory that outlives the worker: a file without a name, held by the supervisor and handed to each worker.
//!
//! Invariant: a section is complete at every moment. A worker may be killed between any two instructions, so content is written beside the
//! current one, and one write of eight bytes makes it current.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use rustix::fs::{FallocateFlags, MemfdFlags};

use crate::diagnostics::tell;
use crate::settings::Level;

/// Room of a section's content, twice. Only what was written takes memory.
const ROOM: u64 = 32 << 20;
const SECTION: u64 = 2 * ROOM + HEADER;
const HEADER: u64 = 4096;

static ZEROS: [u8; 64 << 10] = [0; 64 << 10];

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

#[cfg(test)]
impl Kept {
    /// One that nothing can be written to.
    pub(crate) fn broken() -> Self {
        let memory = rustix::fs::memfd_create("broken", MemfdFlags::ALLOW_SEALING).unwrap();
        rustix::fs::fcntl_add_seals(&memory, rustix::fs::SealFlags::WRITE).unwrap();
        Self { file: Arc::new(memory.into()), start: 0 }
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

    /// Puts this in place of everything. Nothing of what was there before stays in the file, nor of this if it cannot be written.
    pub fn replace(&self, content: &[u8]) -> io::Result<()> {
        let (slot, length) = self.header()?;
        // Whoever was killed in between has left something there.
        self.wipe(1 - slot, 0)?;
        if let Err(error) = self.write(1 - slot, 0, content) {
            let _ = self.wipe(1 - slot, content.len() as u64);
            return Err(error);
        }
        if let Err(error) = self.wipe(slot, length.into()) {
            tell(Level::Warn, format_args!("what was kept before is still in memory: {error}"));
        }
        Ok(())
    }

    /// Writes over so many bytes, then gives the memory of the whole slot back.
    fn wipe(&self, slot: u32, length: u64) -> io::Result<()> {
        let (start, mut at) = (self.slot(slot), 0);
        let end = length.min(ROOM).min(self.file.metadata()?.len().saturating_sub(start));
        while at < end {
            let part = (end - at).min(ZEROS.len() as u64);
            self.file.write_all_at(&ZEROS[..part as usize], start + at)?;
            at += part;
        }
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(rustix::fs::fallocate(&*self.file, hole, start, ROOM)?)
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

    /// Everything in the file.
    fn whole(state: &State) -> Vec<u8> {
        let mut whole = vec![0; state.0.metadata().unwrap().len() as usize];
        state.0.read_exact_at(&mut whole, 0).unwrap();
        whole
    }

    #[test]
    fn nothing_of_what_was_replaced_stays() {
        let state = State::create().unwrap();
        let vault = state.section(Section::Vault);
        let found = |text: &[u8]| memchr::memmem::find(&whole(&state), text).is_some();
        vault.replace(&b"first-secret ".repeat(10_000)).unwrap();
        vault.replace(b"second-secret").unwrap();
        assert!(!found(b"first-secret") && found(b"second-secret"));
        // A worker that was killed before it could wipe, or before what it wrote became current.
        let (slot, _) = vault.header().unwrap();
        state.0.write_all_at(&b"third-secret ".repeat(10), vault.slot(1 - slot)).unwrap();
        vault.replace(b"null").unwrap();
        assert!(!found(b"secret"));
        assert_eq!(vault.read().unwrap(), b"null");
        assert!(vault.replace(&[&b"fourth-secret"[..], &vec![0; ROOM as usize]].concat()).is_err());
        assert!(!found(b"secret"));
    }

    #[test]
    fn what_is_too_long_leaves_the_old() {
        let names = State::create().unwrap().section(Section::Names);
        names.replace(b"old").unwrap();
        assert!(names.replace(&vec![0; ROOM as usize + 1]).is_err());
        assert_eq!(names.read().unwrap(), b"old");
    }
}
