//! Writing a file so that its old content survives any failure: a temporary file beside it, then a rename.
//!
//! A file that has several names, access lists or attributes, or whose directory or owner does not allow a new one in
//! its place, is rewritten where it is, from a complete temporary and with the space for it reserved first.
//! Invariant: until `commit`, the target is untouched; a stage that is dropped leaves nothing behind, and what a killed
//! agent left is removed when the next one first writes to the same directory.

use std::collections::HashSet;
use std::fs::{File, Permissions};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{self, ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, PermissionsExt, fchown};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::fs::{
    AtFlags, FallocateFlags, Mode, OFlags, fallocate, open, openat, renameat, statat, unlinkat,
};
use rustix::io::Errno;

use super::Scope;
use super::edit::Permission;
use super::target::{Place, Target};
use crate::http::reply::Failure;
use crate::init::default_mode;

const PREFIX: &str = ".execd-upload-";
/// How many directories are remembered as swept, and how many entries of one are looked at.
const MAX_SWEPT: usize = 4096;
const MAX_ENTRIES: usize = 100_000;
/// Where the box has no id to tell its temporaries from those of others.
const STALE: Duration = Duration::from_secs(24 * 3600);

#[derive(Debug)]
pub(super) struct Stage {
    target: Target,
    file: Option<File>,
    temporary: Temporary,
    way: Way,
    /// Whether the target outlives the box, so that its content must reach the disk.
    durable: bool,
}

/// How the new content gets in place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Replace,
    Rewrite,
}

impl Stage {
    /// Prepares to write `path`; parents are created, symbolic links followed to what they mean.
    pub(super) fn create(scope: &Scope, path: &Path) -> Result<Self, Failure> {
        let target = Target::find(scope, path)?;
        let failed = |e: io::Error| Failure::io("write", &target.path(), &e).as_runtime();
        let box_id = scope.agent.env.get("OPENSANDBOX_ID").map_or("", String::as_str);
        sweep(&target.place, box_id);
        let must_stay = target.old.as_ref().is_some_and(|old| old.irreplaceable);
        let (temporary, file, mut way) = match Temporary::create(&target.place.path, box_id) {
            Ok((temporary, file)) => (temporary, file, if must_stay { Way::Rewrite } else { Way::Replace }),
            Err(error) if target.old.is_some() && not_allowed(&error) => {
                let elsewhere = scope.agent.env.get("TMPDIR").map_or("/tmp", String::as_str);
                let (temporary, file) = Temporary::create(Path::new(elsewhere), box_id).map_err(failed)?;
                (temporary, file, Way::Rewrite)
            }
            Err(error) => return Err(failed(error)),
        };
        if way == Way::Replace {
            match take_over(scope, &target, &file) {
                Ok(()) => {}
                // The file belongs to somebody else, who keeps it.
                Err(error) if target.old.is_some() && not_allowed(&error) => way = Way::Rewrite,
                Err(error) => return Err(failed(error)),
            }
        }
        let durable = target.place.device != root_device();
        Ok(Stage { target, file: Some(file), temporary, way, durable })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let result = match &mut self.file {
            Some(file) => file.write_all(bytes),
            None => Ok(()),
        };
        result.map_err(|e| self.failed(&e))
    }

    /// Everything has been written. Gives the descriptor back, so that a large form does not hold many, and changes mode
    /// and owner while nobody else can have put another file in this one's place.
    pub(super) fn close(&mut self, permission: &Permission) -> Result<(), Failure> {
        let Some(file) = self.file.take() else { return Ok(()) };
        if self.way == Way::Replace {
            permission.apply_to(&file, &self.target.path())?;
        }
        if self.durable {
            file.sync_all().map_err(|e| self.failed(&e))?;
        }
        Ok(())
    }

    /// Puts the new content in place.
    pub(super) fn commit(mut self, permission: &Permission) -> Result<(), Failure> {
        self.close(permission)?;
        if self.way == Way::Replace {
            match self.replace() {
                Ok(()) => return Ok(()),
                // A file mounted into the box, such as /etc/hosts, or one of somebody else in a sticky directory.
                Err(error)
                    if self.target.old.is_some()
                        && (not_allowed(&error) || error.kind() == ErrorKind::ResourceBusy) => {}
                Err(error) => return Err(self.failed(&error)),
            }
        }
        let target = self.target.open_old().map_err(|e| self.failed(&e))?;
        // A refusal must come before the content changes; what the change of content clears is set once more.
        permission.apply_to(&target, &self.target.path())?;
        self.rewrite(&target).map_err(|e| self.failed(&e))?;
        permission.apply_to(&target, &self.target.path())
    }

    fn replace(&mut self) -> io::Result<()> {
        let dir = self.temporary.place.open()?;
        renameat(&dir, &self.temporary.name, &dir, &self.target.name)?;
        self.temporary.gone = true;
        if self.durable {
            sync_directory(&dir)?;
        }
        Ok(())
    }

    fn rewrite(&self, target: &File) -> io::Result<()> {
        let mut from = self.temporary.open()?;
        let (length, old) = (from.metadata()?.len(), target.metadata()?.len());
        if length > 0 {
            match fallocate(target, FallocateFlags::KEEP_SIZE, 0, length) {
                Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS | Errno::INTR) => {}
                Err(error) => {
                    // Gives back what was reserved beyond the end.
                    target.set_len(old)?;
                    return Err(error.into());
                }
            }
        }
        io::copy(&mut from, &mut &*target)?;
        target.set_len(length)?;
        if self.durable { target.sync_all() } else { Ok(()) }
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::io("write", &self.target.path(), error).as_runtime()
    }
}

/// An existing file keeps owner and mode; a new one belongs to the box's user.
fn take_over(scope: &Scope, target: &Target, file: &File) -> io::Result<()> {
    let now = file.metadata()?;
    let old = target.old.as_ref().map(|old| &old.meta);
    let owner = old.map(|old| (old.uid(), old.gid())).or_else(|| scope.owner());
    if let Some((uid, gid)) = owner.filter(|owner| *owner != (now.uid(), now.gid())) {
        fchown(file, Some(uid), Some(gid))?;
    }
    let mode = old.map_or_else(default_mode, |old| old.mode() & 0o7777);
    file.set_permissions(Permissions::from_mode(mode))
}

fn not_allowed(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
}

/// A file with a name that nobody else uses, removed when it is not needed.
#[derive(Debug)]
struct Temporary {
    place: Place,
    name: String,
    gone: bool,
}

impl Temporary {
    fn create(dir: &Path, box_id: &str) -> io::Result<(Self, File)> {
        let (dir, place) = Place::find(dir)?;
        let name = format!("{PREFIX}{}-{}-{}", box_mark(box_id), own_mark(), uuid::Uuid::new_v4().simple());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = openat(&dir, &name, flags, Mode::RUSR | Mode::WUSR)?;
        Ok((Temporary { place, name, gone: false }, file.into()))
    }

    fn open(&self) -> io::Result<File> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        Ok(openat(self.place.open()?, &self.name, flags, Mode::empty())?.into())
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if self.gone {
            return;
        }
        let (place, name) = (self.place.clone(), std::mem::take(&mut self.name));
        let remove = move || {
            // Best effort: the directory may be gone with everything in it.
            if let Ok(dir) = place.open() {
                let _ = unlinkat(dir, name, AtFlags::empty());
            }
        };
        // A request that is given up is dropped on the runtime's thread, the process's first, where removing a large file
        // would take too long.
        let runtime = tokio::runtime::Handle::try_current().ok();
        let first = rustix::thread::gettid() == rustix::process::getpid();
        match runtime.filter(|_| first) {
            Some(runtime) => drop(runtime.spawn_blocking(remove)),
            None => remove(),
        }
    }
}

fn sync_directory(dir: &OwnedFd) -> io::Result<()> {
    match openat(dir, c".", OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
        Ok(dir) => Ok(rustix::fs::fsync(dir)?),
        // It may be written to and not read.
        Err(Errno::ACCESS) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// What lies on another device than the box's own layer is a volume; the layer itself ends with the box.
fn root_device() -> u64 {
    static ROOT: OnceLock<u64> = OnceLock::new();
    *ROOT.get_or_init(|| Path::new("/").metadata().map_or(0, |meta| meta.dev()))
}

fn own_mark() -> &'static str {
    static MARK: OnceLock<String> = OnceLock::new();
    MARK.get_or_init(|| uuid::Uuid::new_v4().simple().to_string()[..8].to_owned())
}

/// Tells temporaries of this box from those of others that share a volume with it.
fn box_mark(box_id: &str) -> String {
    if box_id.is_empty() {
        return "00000000".into();
    }
    let mut hasher = DefaultHasher::new();
    box_id.hash(&mut hasher);
    format!("{:08x}", hasher.finish() & 0xffff_ffff)
}

/// Removes what an agent that was killed has left in a directory, once for each directory.
fn sweep(place: &Place, box_id: &str) {
    static SWEPT: OnceLock<Mutex<HashSet<(u64, u64)>>> = OnceLock::new();
    {
        let mut swept = SWEPT.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if swept.len() >= MAX_SWEPT {
            swept.clear();
        }
        if !swept.insert(place.key()) {
            return;
        }
    }
    // What cannot be listed or removed stays; the upload itself does not depend on it.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let Ok(dir) = open(&place.path, flags, Mode::empty()) else { return };
    let Ok(entries) = rustix::fs::Dir::read_from(&dir) else { return };
    for entry in entries.take(MAX_ENTRIES).flatten() {
        let name = entry.file_name().to_bytes();
        if is_stale(&dir, name, box_id) {
            let _ = unlinkat(&dir, std::ffi::OsStr::from_bytes(name), AtFlags::empty());
        }
    }
}

fn is_stale(dir: &OwnedFd, name: &[u8], box_id: &str) -> bool {
    let Some(marks) = std::str::from_utf8(name).ok().and_then(|name| name.strip_prefix(PREFIX)) else {
        return false;
    };
    let mut marks = marks.split('-');
    let (of_box, of_agent) = (marks.next().unwrap_or(""), marks.next().unwrap_or(""));
    if of_box.len() != 8 || of_agent.len() != 8 || of_agent == own_mark() {
        return false;
    }
    // In a box there is one agent at a time.
    if !box_id.is_empty() && of_box == box_mark(box_id) {
        return true;
    }
    let Ok(stat) = statat(dir, std::ffi::OsStr::from_bytes(name), AtFlags::SYMLINK_NOFOLLOW) else {
        return false;
    };
    let age = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    age.as_secs().saturating_sub(u64::try_from(stat.st_mtime).unwrap_or(u64::MAX)) > STALE.as_secs()
}
