//! A sandbox directory as files: where each lies, and how it is read and replaced.
//!
//! Invariant: `state.json` is replaced whole (write aside, rename), so a reader never sees half of it. Nothing is
//! synced: after a crash of the machine no box runs, and the server finds the directory by its `spec.json`.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{FlockOperation, fcntl_lock};
use serde::de::DeserializeOwned;

use crate::client::SOCKET;
use crate::spec::{BoxEvent, BoxSpec, BoxState, MutableFacts, SPEC_VERSION};

/// The files that [`BoxDir::append_event`] writes, in the order in which they are read.
pub const EVENT_FILES: [&str; 3] = [EVENTS, OLDER_EGRESS_EVENTS, EGRESS_EVENTS];
const EVENTS: &str = "events.jsonl";
const EGRESS_EVENTS: &str = "egress-events.jsonl";
const OLDER_EGRESS_EVENTS: &str = "egress-events.1.jsonl";
const EGRESS_KIND: &str = "egress.";
/// A few thousand events.
const ROTATE_AT: u64 = 512 << 10;

/// The directory of one box.
#[derive(Clone, Debug)]
pub struct BoxDir {
    path: PathBuf,
}

/// Held by a shim as long as it lives; the kernel lets go of it when the process ends, however it ends.
///
/// A POSIX record lock, because that kind is not inherited by the box's processes.
#[derive(Debug)]
pub struct ShimLock {
    _file: File,
}

impl BoxDir {
    pub fn new(path: &Path) -> Self {
        Self { path: path.to_owned() }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    pub fn root(&self) -> PathBuf {
        self.join("root")
    }

    pub fn socket(&self) -> PathBuf {
        self.join(SOCKET)
    }

    pub fn spec(&self) -> io::Result<BoxSpec> {
        let spec: BoxSpec = read_json(&self.join("spec.json"))?;
        if spec.version != SPEC_VERSION {
            return Err(io::Error::other(format!(
                "spec.json has version {}, not {SPEC_VERSION}",
                spec.version
            )));
        }
        if !is_possible_id(&spec.id) {
            return Err(io::Error::other(format!("spec.json has the impossible id {:?}", spec.id)));
        }
        Ok(spec)
    }

    /// No file means no expiry.
    pub fn facts(&self) -> io::Result<MutableFacts> {
        match read_json(&self.join("facts.json")) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(MutableFacts::default()),
            other => other,
        }
    }

    /// `None` before the shim wrote it.
    pub fn state(&self) -> io::Result<Option<BoxState>> {
        match read_json(&self.join("state.json")) {
            Ok(state) => Ok(Some(state)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    pub fn write_state(&self, state: &BoxState) -> io::Result<()> {
        let aside = self.join("state.json.new");
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(&serde_json::to_vec(state)?)?;
        fs::rename(&aside, self.join("state.json"))
    }

    /// Events of the egress policy lie apart, because a box makes as many as it likes: only the newest are kept.
    pub fn append_event(&self, event: &BoxEvent) -> io::Result<()> {
        let mut line = serde_json::to_vec(event)?;
        line.push(b'\n');
        let open = |name| OpenOptions::new().append(true).create(true).mode(0o600).open(self.join(name));
        if !event.kind.starts_with(EGRESS_KIND) {
            return open(EVENTS)?.write_all(&line);
        }
        let mut file = open(EGRESS_EVENTS)?;
        if file.metadata()?.len() >= ROTATE_AT {
            fs::rename(self.join(EGRESS_EVENTS), self.join(OLDER_EGRESS_EVENTS))?;
            file = open(EGRESS_EVENTS)?;
        }
        file.write_all(&line)
    }

    /// Fails with `WouldBlock` when another shim holds it.
    pub fn lock(&self) -> io::Result<ShimLock> {
        let file = self.lock_file()?;
        match fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(ShimLock { _file: file }),
            Err(rustix::io::Errno::ACCESS | rustix::io::Errno::AGAIN) => {
                Err(io::ErrorKind::WouldBlock.into())
            }
            Err(error) => Err(error.into()),
        }
    }

    /// Whether some process holds the lock.
    pub fn is_locked(&self) -> io::Result<bool> {
        let file = match File::options().read(true).write(true).open(self.join("shim.lock")) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(error),
        };
        let question = rustix::process::Flock {
            start: 0,
            length: 0,
            pid: None,
            typ: rustix::process::FlockType::WriteLock,
            offset_type: rustix::process::FlockOffsetType::Set,
        };
        Ok(rustix::process::fcntl_getlk(&file, &question)?.is_some())
    }

    fn lock_file(&self) -> io::Result<File> {
        let path = self.join("shim.lock");
        OpenOptions::new().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)
    }
}

/// An id names control groups, as a single directory.
pub fn is_possible_id(id: &str) -> bool {
    !id.is_empty() && !id.starts_with('.') && !id.contains(['/', '\0'])
}

fn read_json<T: DeserializeOwned>(path: &Path) -> io::Result<T> {
    let bytes = fs::read(path)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, format!("{}: {error}", path.display())))
}

/// Wall clock in milliseconds; the only place of this crate that reads it.
pub fn now_ms() -> i64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_millis() as i64)
}

/// Clock ticks after boot at which a process started: with the boot id this makes a pid unambiguous.
pub fn start_ticks(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may contain spaces and parentheses; the 22nd field counts from behind its end.
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Changes at every start of the machine.
pub fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_or_else(|_| String::new(), |id| id.trim().into())
}
