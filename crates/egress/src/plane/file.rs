//! The policy on disk, for the next start.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::policy::document::Policy;

/// A file that may not be set.
#[derive(Debug)]
pub struct PolicyFile(Option<PathBuf>);

/// What the file held before it was written.
#[derive(Debug)]
pub struct Before(Option<Vec<u8>>);

/// Bytes of a file that are read.
const LONGEST: u64 = 16 << 20;

const PRIVATE: u32 = 0o600;

impl PolicyFile {
    pub fn new(path: Option<PathBuf>) -> Self {
        Self(path)
    }

    /// The stored policy, none if nothing was ever stored.
    pub fn read(&self) -> io::Result<Option<Policy>> {
        let Some(path) = &self.0 else { return Ok(None) };
        let told = |problem: String| io::Error::other(format!("{}: {problem}", path.display()));
        let Some(content) = content(path).map_err(|error| told(error.to_string()))? else {
            return Ok(None);
        };
        let text = String::from_utf8(content).map_err(|error| told(error.to_string()))?;
        if text.trim().is_empty() {
            return Err(told("the file is empty".into()));
        }
        Policy::parse(&text).map(Some).map_err(|problem| told(problem.to_string()))
    }

    /// Stores a policy so that a crash leaves the old one or this one.
    pub fn write(&self, policy: &Policy) -> io::Result<Before> {
        let Some(path) = &self.0 else { return Ok(Before(None)) };
        let before = Before(content(path)?);
        let mut text = serde_json::to_vec_pretty(policy)?;
        text.push(b'\n');
        put(path, &text)?;
        Ok(before)
    }

    /// Puts back what was there.
    pub fn restore(&self, before: Before) -> io::Result<()> {
        match (&self.0, before.0) {
            (None, _) => Ok(()),
            (Some(path), Some(content)) => put(path, &content),
            (Some(path), None) => std::fs::remove_file(path),
        }
    }
}

fn content(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
        Ok(data) if data.len() > LONGEST => Err(io::ErrorKind::FileTooLarge.into()),
        Ok(_) => std::fs::read(path).map(Some),
    }
}

fn put(path: &Path, content: &[u8]) -> io::Result<()> {
    let mode = std::fs::metadata(path).map_or(PRIVATE, |data| data.mode() & 0o7777);
    let beside = path.with_extension("new");
    let create =
        |path: &Path| OpenOptions::new().write(true).create(true).truncate(true).mode(mode).open(path);
    let written = write_synced(create(&beside)?, content).and_then(|()| std::fs::rename(&beside, path));
    match written {
        Ok(()) => sync_folder(path),
        // A single file that is mounted can be written but not replaced.
        Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
            let _ = std::fs::remove_file(&beside);
            write_synced(create(path)?, content)
        }
        Err(error) => {
            let _ = std::fs::remove_file(&beside);
            Err(error)
        }
    }
}

fn write_synced(mut file: File, content: &[u8]) -> io::Result<()> {
    file.write_all(content)?;
    file.sync_all()
}

fn sync_folder(path: &Path) -> io::Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn what_is_written_is_read_and_can_be_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.json");
        let file = PolicyFile::new(Some(path.clone()));
        assert!(file.read().unwrap().is_none());
        let policy = Policy::parse(r#"{"egress":[{"action":"allow","target":"a.test"}]}"#).unwrap();
        let before = file.write(&policy).unwrap();
        assert_eq!(file.read().unwrap().unwrap(), policy);
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        assert!(std::fs::read_to_string(&path).unwrap().ends_with("}\n"));

        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        let first = file.write(&Policy::deny_all()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o640);
        file.restore(first).unwrap();
        assert_eq!(file.read().unwrap().unwrap(), policy);
        file.restore(before).unwrap();
        assert!(!path.exists());
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_makes_no_sense_is_told() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("policy.json");
        for content in ["", "{", "\u{0}"] {
            std::fs::write(&path, content).unwrap();
            assert!(PolicyFile::new(Some(path.clone())).read().is_err());
        }
        assert!(PolicyFile::new(None).read().unwrap().is_none());
    }
}
