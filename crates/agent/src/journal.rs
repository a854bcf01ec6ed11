//! What the agent has to say about itself: a line on standard error, or in the file that it was given.
//!
//! Invariant: saying something never fails and never blocks on anything but a local file, and a file stays below [`MAX_FILE`] twice.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use jiff::Timestamp;

/// The file is moved aside at this size, and what was aside before is gone.
const MAX_FILE: u64 = 4 << 20;

/// How much it matters, in the numbers of syslog.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// The agent ends because of it.
    Fatal = 2,
    Error = 3,
    Warning = 4,
    Info = 6,
    Debug = 7,
}

impl Level {
    fn word(self) -> &'static str {
        match self {
            Level::Fatal => "fatal",
            Level::Error => "error",
            Level::Warning => "warning",
            Level::Info => "info",
            Level::Debug => "debug",
        }
    }
}

struct Journal {
    most: u8,
    file: Option<Mutex<Output>>,
}

struct Output {
    path: PathBuf,
    file: File,
    written: u64,
}

static JOURNAL: OnceLock<Journal> = OnceLock::new();

/// Sets what is said (0 to 7) and where, for good. A file that cannot be written leaves standard error.
pub fn open(most: u8, path: Option<&Path>) {
    let output = path.map(|path| Output::open(path).map_err(|error| (path, error)));
    let (file, complaint) = match output {
        Some(Ok(output)) => (Some(Mutex::new(output)), None),
        Some(Err((path, error))) => (None, Some(format!("cannot log to {}: {error}", path.display()))),
        None => (None, None),
    };
    let _ = JOURNAL.set(Journal { most, file });
    if let Some(complaint) = complaint {
        note(Level::Warning, &complaint);
    }
}

/// Says one thing, in one line.
pub fn note(level: Level, text: &str) {
    let journal = JOURNAL.get();
    // What ends the agent is always said: somebody waits for the reason.
    if level > Level::Fatal && level as u8 > journal.map_or(6, |journal| journal.most) {
        return;
    }
    let file = journal.and_then(|journal| journal.file.as_ref());
    if let Some(file) = file {
        file.lock().unwrap_or_else(PoisonError::into_inner).write(level, text);
    }
    if file.is_none() || level == Level::Fatal {
        // Standard error may be closed or broken; that must not matter. Whoever looks for the reason of an end knows its form.
        let _ = match level {
            Level::Fatal => writeln!(io::stderr(), "execd: {text}"),
            _ => writeln!(io::stderr(), "execd[{}]: {text}", level.word()),
        };
    }
}

impl Output {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let written = file.metadata()?.len();
        Ok(Output { path: path.to_owned(), file, written })
    }

    fn write(&mut self, level: Level, text: &str) {
        let line = format!("{:.3} {} {text}\n", Timestamp::now(), level.word());
        if self.written > 0 && self.written + line.len() as u64 > MAX_FILE {
            let mut aside = self.path.clone().into_os_string();
            aside.push(".1");
            let _ = std::fs::rename(&self.path, aside);
            match Output::open(&self.path) {
                Ok(fresh) => *self = fresh,
                // Better nothing than a file without end.
                Err(_) => return,
            }
        }
        if self.file.write_all(line.as_bytes()).is_ok() {
            self.written += line.len() as u64;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_does_not_grow_without_end() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("log");
        std::fs::write(&path, vec![b'x'; MAX_FILE as usize]).unwrap();
        let mut output = Output::open(&path).unwrap();
        output.write(Level::Info, "first");
        output.write(Level::Warning, "second");
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.ends_with("Z warning second\n") && text.contains(" info first\n"), "{text}");
        assert_eq!(std::fs::metadata(dir.path().join("log.1")).unwrap().len(), MAX_FILE);
    }
}
