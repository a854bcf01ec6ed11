//! What the program writes to its standard error: the newest part of it in `egress.log`.
//!
//! Invariant: the program never waits for the disk. What cannot be written is lost, and the files stay below twice
//! [`ROTATE_AT`].

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;

const ROTATE_AT: u64 = 1 << 20;
const TAIL: usize = 600;
const READS_A_TURN: usize = 8;

#[derive(Debug)]
pub struct Log {
    path: PathBuf,
    pipe: Option<OwnedFd>,
    tail: Vec<u8>,
}

impl Log {
    pub fn new(path: PathBuf) -> Self {
        Self { path, pipe: None, tail: Vec::new() }
    }

    pub fn listen(&mut self, pipe: OwnedFd) -> io::Result<()> {
        rustix::io::ioctl_fionbio(&pipe, true)?;
        self.pipe = Some(pipe);
        Ok(())
    }

    pub fn readable(&self) -> Option<BorrowedFd<'_>> {
        self.pipe.as_ref().map(AsFd::as_fd)
    }

    /// Moves what is there, within a turn's share.
    pub fn pump(&mut self) {
        for _ in 0..READS_A_TURN {
            let mut chunk = [0; 4096];
            let Some(pipe) = &self.pipe else { return };
            match rustix::io::read(pipe, &mut chunk) {
                Ok(0) => self.pipe = None,
                Ok(length) => {
                    self.tail.extend_from_slice(&chunk[..length]);
                    let surplus = self.tail.len().saturating_sub(TAIL);
                    self.tail.drain(..surplus);
                    let _ = self.append(&chunk[..length]);
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return,
                Err(_) => self.pipe = None,
            }
        }
    }

    /// The end of what was written, as one line.
    pub fn tail(&self) -> String {
        String::from_utf8_lossy(&self.tail).trim().replace('\n', "; ")
    }

    fn append(&self, bytes: &[u8]) -> io::Result<()> {
        let mut file = self.open()?;
        if file.metadata()?.len() >= ROTATE_AT {
            fs::rename(&self.path, self.path.with_extension("log.1"))?;
            file = self.open()?;
        }
        file.write_all(bytes)
    }

    fn open(&self) -> io::Result<File> {
        OpenOptions::new().append(true).create(true).mode(0o600).open(&self.path)
    }
}
