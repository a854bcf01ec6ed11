//! Rules that apply whatever the policy says: files of the operator, read again when they change, never shown and never stored.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::target::Target;

const DENY: &str = "deny.always";
const ALLOW: &str = "allow.always";
const LOG_SKIP: &str = "log_skip.always";

/// Longer files are refused: memory is bounded.
const LONGEST: u64 = 1 << 20;

/// What the files say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Always {
    pub deny: Vec<String>,
    pub allow: Vec<String>,
    /// Denials of these names are not told.
    pub log_skip: Vec<Target>,
}

impl Always {
    /// Whether a denial of this name goes without a word.
    pub fn skips(&self, name: &str) -> bool {
        self.log_skip.iter().any(|target| target.covers_name(name))
    }
}

/// The folder with the files.
#[derive(Debug)]
pub struct AlwaysFiles {
    folder: PathBuf,
    seen: Vec<Option<Stamp>>,
}

type Stamp = (u64, i64, i64, u64);

impl AlwaysFiles {
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into(), seen: Vec::new() }
    }

    /// The content, if any file has changed since the last reading that succeeded. A missing file is an empty one.
    pub fn changed(&mut self) -> io::Result<Option<Always>> {
        let now = [DENY, ALLOW, LOG_SKIP].map(|name| stamp(&self.folder.join(name)));
        if self.seen == now {
            return Ok(None);
        }
        let always = Always {
            deny: lines(&self.folder.join(DENY))?,
            allow: lines(&self.folder.join(ALLOW))?,
            log_skip: lines(&self.folder.join(LOG_SKIP))?.iter().map(|line| Target::read(line)).collect(),
        };
        self.seen = now.to_vec();
        Ok(Some(always))
    }

    /// What was read did not come into force: it is read again.
    pub fn forget(&mut self) {
        self.seen.clear();
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let data = std::fs::metadata(path).ok()?;
    Some((data.ino(), data.mtime(), data.mtime_nsec(), data.size()))
}

fn lines(path: &Path) -> io::Result<Vec<String>> {
    let told = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
    match std::fs::metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Ok(data) if data.len() > LONGEST => {
            return Err(told(io::Error::new(io::ErrorKind::FileTooLarge, "longer than 1 MiB")));
        }
        other => other.map_err(told)?,
    };
    let text = std::fs::read_to_string(path).map_err(told)?;
    let meant = text.lines().map(|line| line.split('#').next().unwrap_or_default().trim());
    Ok(meant.filter(|line| !line.is_empty()).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_when_they_change() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = AlwaysFiles::new(folder.path());
        assert_eq!(files.changed().unwrap(), Some(Always::default()));
        assert_eq!(files.changed().unwrap(), None);

        std::fs::write(folder.path().join(DENY), "# nobody\n bad.test # because\n\n10.0.0.0/8\n").unwrap();
        std::fs::write(folder.path().join(LOG_SKIP), "*.noise.test\n").unwrap();
        let read = files.changed().unwrap().unwrap();
        assert_eq!(read.deny, ["bad.test", "10.0.0.0/8"]);
        assert!(read.skips("a.noise.test") && !read.skips("noise.test"));
        assert_eq!(files.changed().unwrap(), None);

        std::fs::remove_file(folder.path().join(DENY)).unwrap();
        assert!(files.changed().unwrap().unwrap().deny.is_empty());
    }

    #[test]
    fn what_cannot_be_read_is_told_and_tried_again() {
        let folder = tempfile::tempdir().unwrap();
        let mut files = AlwaysFiles::new(folder.path());
        files.changed().unwrap();
        std::fs::write(folder.path().join(ALLOW), [0xff, 0xfe]).unwrap();
        assert!(files.changed().unwrap_err().to_string().contains(ALLOW));
        assert!(files.changed().is_err());
        std::fs::write(folder.path().join(ALLOW), "good.test").unwrap();
        assert_eq!(files.changed().unwrap().unwrap().allow, ["good.test"]);
    }
}
