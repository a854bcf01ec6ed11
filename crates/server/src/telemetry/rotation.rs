//! A log file that moves itself aside when it is full.
//!
//! `server.log` is the newest, `server.log.1` the one before, up to the number of files to keep. A failure to rotate
//! never loses a record: writing goes on in the same file and rotation is tried again later.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use crate::config::ByteSize;

/// One log file with its rotated predecessors.
#[derive(Debug)]
pub(super) struct RotatingFile {
    path: PathBuf,
    max: u64,
    backups: u32,
    file: File,
    size: u64,
}

impl RotatingFile {
    /// Opens the file for appending; creates it and its parents.
    pub(super) fn open(path: &Path, max: ByteSize, backups: u32) -> io::Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let file = open(path)?;
        let size = file.metadata()?.len();
        Ok(Self { path: path.to_owned(), max: max.bytes(), backups, file, size })
    }

    fn rotate(&mut self) -> io::Result<()> {
        if self.backups == 0 {
            self.file.set_len(0)?;
        } else {
            for number in (1..self.backups).rev() {
                rename_if_there(&self.backup(number), &self.backup(number + 1))?;
            }
            rename_if_there(&self.path, &self.backup(1))?;
            self.file = open(&self.path)?;
        }
        self.size = 0;
        Ok(())
    }

    fn backup(&self, number: u32) -> PathBuf {
        let mut name = self.path.as_os_str().to_owned();
        name.push(format!(".{number}"));
        PathBuf::from(name)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o640).open(path)
}

fn rename_if_there(from: &Path, to: &Path) -> io::Result<()> {
    match fs::rename(from, to) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

impl Write for RotatingFile {
    /// Takes a whole record, so that no record is split between two files.
    fn write(&mut self, record: &[u8]) -> io::Result<usize> {
        let full = self.size > 0 && self.size.saturating_add(record.len() as u64) > self.max;
        if full && self.rotate().is_err() {
            // Keep the record; the next one tries again.
            self.size = self.max;
        }
        self.file.write_all(record)?;
        self.size = self.size.saturating_add(record.len() as u64);
        Ok(record.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(dir: &Path, name: &str) -> Option<String> {
        fs::read_to_string(dir.join(name)).ok()
    }

    #[test]
    fn a_full_file_is_moved_aside_and_the_oldest_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("deep/er/server.log");
        let mut log = RotatingFile::open(&path, ByteSize::from_bytes(8), 2).unwrap();
        for record in ["one 1\n", "two 2\n", "three 3\n", "four 4\n"] {
            assert_eq!(log.write(record.as_bytes()).unwrap(), record.len());
        }
        let dir = path.parent().unwrap();
        assert_eq!(read(dir, "server.log").unwrap(), "four 4\n");
        assert_eq!(read(dir, "server.log.1").unwrap(), "three 3\n");
        assert_eq!(read(dir, "server.log.2").unwrap(), "two 2\n");
        assert_eq!(read(dir, "server.log.3"), None);
    }

    #[test]
    fn without_backups_a_full_file_is_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.log");
        let mut log = RotatingFile::open(&path, ByteSize::from_bytes(8), 0).unwrap();
        log.write_all(b"one 1\n").unwrap();
        log.write_all(b"two 2\n").unwrap();
        assert_eq!(read(dir.path(), "server.log").unwrap(), "two 2\n");
        assert_eq!(read(dir.path(), "server.log.1"), None);
    }

    #[test]
    fn a_restart_counts_what_is_already_there() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.log");
        fs::write(&path, "old old\n").unwrap();
        let mut log = RotatingFile::open(&path, ByteSize::from_bytes(10), 1).unwrap();
        log.write_all(b"new\n").unwrap();
        assert_eq!(read(dir.path(), "server.log").unwrap(), "new\n");
        assert_eq!(read(dir.path(), "server.log.1").unwrap(), "old old\n");
    }

    #[test]
    fn a_record_larger_than_the_limit_is_kept_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.log");
        let mut log = RotatingFile::open(&path, ByteSize::from_bytes(4), 1).unwrap();
        log.write_all(b"a long record\n").unwrap();
        assert_eq!(read(dir.path(), "server.log").unwrap(), "a long record\n");
        assert_eq!(read(dir.path(), "server.log.1"), None);
    }

    #[test]
    fn a_failed_rotation_loses_no_record() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("server.log");
        // A directory where the backup belongs cannot be replaced by a file.
        fs::create_dir_all(dir.path().join("server.log.1/x")).unwrap();
        let mut log = RotatingFile::open(&path, ByteSize::from_bytes(4), 1).unwrap();
        log.write_all(b"one\n").unwrap();
        log.write_all(b"two\n").unwrap();
        assert_eq!(read(dir.path(), "server.log").unwrap(), "one\ntwo\n");
    }
}
