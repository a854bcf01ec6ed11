//! A box's control group: limits, freezer, what it uses, what it ran into.
//!
//! One group `sandglass/<id>` in every v1 hierarchy that matters, or one in the v2 hierarchy. A machine with both
//! ("hybrid") counts as v1: there the controllers sit.
//! Not here: who enters the group when; `launch` does that, because it decides how fast a create is.
//! Invariant: a limit that was asked for and cannot be enforced is an error, never ignored.

mod layout;
mod v1;
mod v2;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

pub use layout::{Controller, Layout};

use crate::protocol::Usage;
use crate::spec::Limits;

/// Above all boxes.
const PARENT: &str = "sandglass";

/// How long processes may take to vanish after SIGKILL: uninterruptible sleep on slow disks happens.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// The groups of one box.
#[derive(Debug)]
pub enum Cgroup {
    V1(v1::Groups),
    V2(v2::Group),
}

/// How the first process of a box gets into its groups.
#[derive(Debug)]
pub enum Entry {
    /// The child writes `0` into each: quicker than an attach by pid, which takes a machine-wide lock.
    /// The right to do so comes from who opened the files.
    Tasks(Vec<OwnedFd>),
    /// clone3 starts the child in it.
    Directory(OwnedFd),
}

/// Counters that only ever rise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mishaps {
    pub oom_kills: u64,
    pub forks_refused: u64,
}

/// What to poll for mishaps.
#[derive(Debug, Default)]
pub struct Watches {
    /// v1: an eventfd, readable after an OOM.
    pub oom_eventfd: Option<OwnedFd>,
    /// Files that report POLLPRI when a counter in them changed.
    pub files: Vec<OwnedFd>,
}

impl Cgroup {
    /// Makes the groups and sets the limits. On failure nothing is left.
    pub fn create(layout: &Layout, id: &str, limits: &Limits) -> io::Result<Self> {
        let group = Self::locate(layout, id);
        let made = match &group {
            Self::V1(groups) => groups.create(layout, limits),
            Self::V2(group) => group.create(layout, limits),
        };
        match made {
            Ok(()) => Ok(group),
            Err(error) => {
                // The first error is the one to report.
                let _ = group.remove();
                Err(error)
            }
        }
    }

    /// The groups of box `id`, whether or not they exist.
    pub fn locate(layout: &Layout, id: &str) -> Self {
        match layout {
            Layout::V1 { hierarchies } => Self::V1(v1::Groups::new(hierarchies, id)),
            Layout::V2 { mount, .. } => Self::V2(v2::Group::new(mount, id)),
        }
    }

    pub fn entry(&self) -> io::Result<Entry> {
        match self {
            Self::V1(groups) => groups.tasks().map(Entry::Tasks),
            Self::V2(group) => group.open().map(Entry::Directory),
        }
    }

    /// Directories worth showing inside the box, with their place under `/sys/fs/cgroup` ("" is the place itself).
    pub fn visible(&self) -> Vec<(PathBuf, &'static str)> {
        match self {
            Self::V1(groups) => groups.visible(),
            Self::V2(group) => vec![(group.path().to_owned(), "")],
        }
    }

    /// Stops or continues every process and returns when that is true.
    pub fn set_frozen(&self, wanted: Frozen) -> io::Result<()> {
        match self {
            Self::V1(groups) => groups.set_frozen(wanted),
            Self::V2(group) => group.set_frozen(wanted),
        }
    }

    pub fn usage(&self) -> Usage {
        match self {
            Self::V1(groups) => groups.usage(),
            Self::V2(group) => group.usage(),
        }
    }

    pub fn mishaps(&self) -> Mishaps {
        match self {
            Self::V1(groups) => groups.mishaps(),
            Self::V2(group) => group.mishaps(),
        }
    }

    pub fn watches(&self) -> io::Result<Watches> {
        match self {
            Self::V1(groups) => groups.watches(),
            Self::V2(group) => group.watches(),
        }
    }

    /// Thaws and kills everything inside, then waits until nothing is.
    pub fn kill(&self) -> io::Result<()> {
        if self.directories().iter().all(|dir| !dir.exists()) {
            return Ok(());
        }
        // A frozen v1 group would keep its dead.
        let _ = self.set_frozen(Frozen::No);
        if let Self::V2(group) = self {
            group.kill();
        }
        let deadline = Instant::now() + EMPTY_WITHIN;
        loop {
            let left = self.processes();
            if left.is_empty() {
                return Ok(());
            }
            for pid in &left {
                let _ = kill_process(*pid, Signal::KILL);
            }
            if Instant::now() > deadline {
                let pids: Vec<i32> = left.iter().map(|pid| pid.as_raw_nonzero().get()).collect();
                return Err(io::Error::other(format!("processes {pids:?} survive SIGKILL")));
            }
            std::thread::sleep(Duration::from_micros(300));
        }
    }

    /// Removes the groups; absent ones are fine.
    pub fn remove(&self) -> io::Result<()> {
        self.directories().iter().try_for_each(|dir| remove_group(dir))
    }

    fn processes(&self) -> Vec<Pid> {
        let mut all: Vec<Pid> = Vec::new();
        for dir in self.directories() {
            let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
            all.extend(text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)));
        }
        all.sort_unstable_by_key(|pid| pid.as_raw_nonzero());
        all.dedup();
        all
    }

    fn directories(&self) -> Vec<&Path> {
        match self {
            Self::V1(groups) => groups.directories(),
            Self::V2(group) => vec![group.path()],
        }
    }
}

/// See [`Cgroup::set_frozen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frozen {
    Yes,
    No,
}

/// rmdir answers "busy" for a moment after the last process is gone.
fn remove_group(dir: &Path) -> io::Result<()> {
    let deadline = Instant::now() + Duration::from_secs(2);
    loop {
        match fs::remove_dir(dir) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if Instant::now() > deadline => {
                return Err(io::Error::new(error.kind(), format!("{}: {error}", dir.display())));
            }
            Err(_) => {
                // Groups that something made below ours; the box cannot, but an administrator may.
                if let Ok(entries) = fs::read_dir(dir) {
                    for entry in entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())) {
                        let _ = fs::remove_dir(entry.path());
                    }
                }
                std::thread::sleep(Duration::from_micros(500));
            }
        }
    }
}

fn make_group(dir: &Path) -> io::Result<()> {
    match fs::create_dir(dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if let Some(parent) = dir.parent() {
                match fs::create_dir(parent) {
                    Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                        return Err(named(parent, &error));
                    }
                    _ => {}
                }
            }
            fs::create_dir(dir).map_err(|error| named(dir, &error))
        }
        other => other.map_err(|error| named(dir, &error)),
    }
}

fn set(dir: &Path, file: &str, value: &str) -> io::Result<()> {
    let path = dir.join(file);
    // Never with O_CREAT or O_TRUNC, which control files may refuse.
    let mut handle = fs::File::options().write(true).open(&path).map_err(|error| named(&path, &error))?;
    io::Write::write_all(&mut handle, value.as_bytes())
        .map_err(|error| io::Error::new(error.kind(), format!("{} = {value}: {error}", path.display())))
}

fn number(dir: &Path, file: &str) -> Option<u64> {
    fs::read_to_string(dir.join(file)).ok()?.trim().parse().ok()
}

/// The value after `key` in a file of `key value` lines.
fn keyed(dir: &Path, file: &str, key: &str) -> Option<u64> {
    let text = fs::read_to_string(dir.join(file)).ok()?;
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

fn named(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

fn missing(what: &str, controller: Controller) -> io::Error {
    io::Error::new(
        io::ErrorKind::Unsupported,
        format!(
            "a {what} limit needs the cgroup controller `{}`, which this host does not offer",
            controller.name()
        ),
    )
}
