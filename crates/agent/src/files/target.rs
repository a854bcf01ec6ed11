//! Where a file that is about to be written really is: its directory held by identity instead of by path, the file
//! opened for writing so that the kernel has said yes.
//!
//! Invariant: between one look and the next, nothing in a directory that changed places is touched.

use std::ffi::OsString;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, fstat, open, openat, readlinkat, statat};
use rustix::io::Errno;

use super::Scope;
use super::edit::create_parents;
use crate::http::reply::Failure;

const MAX_LINKS: usize = 40;
/// Out of the thousand descriptors that a process often has.
const MAX_HELD: usize = 128;
/// How a file is opened for writing without waiting for anybody and without following a link.
const WRITE: OFlags = OFlags::WRONLY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::NONBLOCK)
    .union(OFlags::NOCTTY)
    .union(OFlags::CLOEXEC);

/// A directory as it was when it was looked at.
#[derive(Debug, Clone)]
pub(super) struct Place {
    pub(super) path: PathBuf,
    pub(super) device: u64,
    inode: u64,
    held: Option<Arc<Held>>,
}

impl Place {
    pub(super) fn find(path: &Path) -> io::Result<(Arc<OwnedFd>, Self)> {
        // Searching is all that is needed, and all that may be allowed.
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = Arc::new(open(path, flags, Mode::empty())?);
        let stat = fstat(&dir)?;
        let held = Held::new(&dir);
        Ok((dir, Place { path: path.to_owned(), device: stat.st_dev, inode: stat.st_ino, held }))
    }

    /// The same directory once more, or an error when another one has taken its place.
    pub(super) fn open(&self) -> io::Result<Arc<OwnedFd>> {
        if let Some(held) = &self.held {
            return Ok(Arc::clone(&held.0));
        }
        match Place::find(&self.path)? {
            (dir, now) if now.key() == self.key() => Ok(dir),
            _ => Err(io::Error::other("its directory was replaced meanwhile")),
        }
    }

    /// What tells this directory from all others.
    pub(super) fn key(&self) -> (u64, u64) {
        (self.device, self.inode)
    }
}

/// A directory that is kept open, which needs no second look. There are few of them: a form may have files in thousands.
#[derive(Debug)]
struct Held(Arc<OwnedFd>);

static HELD: AtomicUsize = AtomicUsize::new(0);

impl Held {
    fn new(dir: &Arc<OwnedFd>) -> Option<Arc<Self>> {
        if HELD.fetch_add(1, Ordering::Relaxed) < MAX_HELD {
            return Some(Arc::new(Held(Arc::clone(dir))));
        }
        HELD.fetch_sub(1, Ordering::Relaxed);
        None
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        HELD.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The file that is to get new content.
#[derive(Debug)]
pub(super) struct Target {
    pub(super) place: Place,
    pub(super) name: OsString,
    pub(super) old: Option<Old>,
}

#[derive(Debug)]
pub(super) struct Old {
    pub(super) meta: Metadata,
    /// Has several names, or something attached that a new file would not have.
    pub(super) irreplaceable: bool,
}

impl Target {
    /// Follows links to what they mean and creates missing parents. The file itself need not exist.
    pub(super) fn find(scope: &Scope, path: &Path) -> Result<Self, Failure> {
        let mut path = path.to_owned();
        for _ in 0..MAX_LINKS {
            let failed = |e: io::Error| Failure::io("open", &path, &e).as_runtime();
            let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
                return Err(is_directory(&path));
            };
            create_parents(scope, parent)?;
            let (dir, place) = Place::find(parent).map_err(failed)?;
            let name = name.to_owned();
            let found = match statat(&dir, &name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => FileType::from_raw_mode(stat.st_mode),
                Err(Errno::NOENT) => return Ok(Target { place, name, old: None }),
                Err(error) => return Err(failed(error.into())),
            };
            match found {
                FileType::Symlink => match readlinkat(&dir, &name, Vec::new()) {
                    Ok(link) => path = parent.join(OsString::from_vec(link.into_bytes())),
                    // Not a link any more.
                    Err(Errno::INVAL | Errno::NOENT) => {}
                    Err(error) => return Err(failed(error.into())),
                },
                FileType::RegularFile => match look(&dir, &name) {
                    Ok(old) => return Ok(Target { place, name, old }),
                    // A link by now.
                    Err(error) if error.raw_os_error() == Some(libc::ELOOP) => {}
                    Err(error) => return Err(failed(error)),
                },
                FileType::Directory => return Err(is_directory(&path)),
                _ => return Err(not_regular(&path)),
            }
        }
        Err(Failure::runtime(format!("open {}: too many levels of symbolic links", path.display())))
    }

    pub(super) fn path(&self) -> PathBuf {
        self.place.path.join(&self.name)
    }

    /// The very file that was found, for writing.
    pub(super) fn open_old(&self) -> io::Result<File> {
        let changed = || io::Error::other("it was replaced meanwhile");
        let old = self.old.as_ref().ok_or_else(changed)?;
        let file = File::from(openat(self.place.open()?, &self.name, WRITE, Mode::empty())?);
        let now = file.metadata()?;
        if (now.dev(), now.ino()) == (old.meta.dev(), old.meta.ino()) { Ok(file) } else { Err(changed()) }
    }
}

fn look(dir: &OwnedFd, name: &OsString) -> io::Result<Option<Old>> {
    let file = match openat(dir, name, WRITE, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return Ok(None),
        // A program that runs. Writing has been allowed before this was noticed, and a new file in its place is no harm.
        Err(Errno::TXTBSY) => {
            openat(dir, name, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?
        }
        Err(error) => return Err(error.into()),
    };
    let attributes = has_attributes(&file);
    let file = File::from(file);
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let irreplaceable = meta.nlink() > 1 || attributes;
    Ok(Some(Old { meta, irreplaceable }))
}

/// Access lists and attributes of the user. Security labels are given by the system, and capabilities end with a write.
fn has_attributes(file: &OwnedFd) -> bool {
    let mut names = Vec::with_capacity(1024);
    match rustix::fs::flistxattr(file, rustix::buffer::spare_capacity(&mut names)) {
        Ok(_) => names.split(|b| *b == 0).any(|name| !name.is_empty() && !name.starts_with(b"security.")),
        // More than fits.
        Err(Errno::RANGE) => true,
        // A file system without any.
        Err(_) => false,
    }
}

fn is_directory(path: &Path) -> Failure {
    Failure::runtime(format!("open {}: is a directory", path.display()))
}

fn not_regular(path: &Path) -> Failure {
    Failure::runtime(format!("open {}: not a regular file", path.display()))
}
