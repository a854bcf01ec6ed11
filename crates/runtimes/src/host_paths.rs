//! Paths of the host that sandboxes may be able to change: where they lead, and opening them without being led elsewhere.
//!
//! Owns the walk over links and missing parts. It judges nothing: callers compare with what they allow. Invariant: nothing is made by name,
//! because a link that comes into a path between a check and a `mkdir` leads it anywhere.

use std::{
    fs,
    io::{self, ErrorKind},
    os::{
        fd::{AsFd, OwnedFd},
        unix::fs::{DirBuilderExt, PermissionsExt},
    },
    path::{Component, Path, PathBuf},
};

use rustix::fs::{Mode, OFlags, ResolveFlags};

/// A directory that only its owner may enter, with its parents.
pub(crate) fn private_dir(path: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
    // One that was there before may have been made by a package or by hand.
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
}

/// Resolves the longest part that exists and appends the rest unchanged.
///
/// # Errors
/// `NotFound` for a link that leads nowhere: making the directory would make its target, wherever that is.
pub fn resolve_existing(path: &Path) -> io::Result<PathBuf> {
    let mut rest = Vec::new();
    let mut existing = path;
    loop {
        match fs::canonicalize(existing) {
            Ok(resolved) => return Ok(rest.iter().rev().fold(resolved, |whole, part| whole.join(part))),
            Err(error) if error.kind() == ErrorKind::NotFound && fs::symlink_metadata(existing).is_err() => {
                let (Some(parent), Some(name)) = (existing.parent(), existing.file_name()) else {
                    return Err(error);
                };
                rest.push(name);
                existing = parent;
            }
            Err(error) => return Err(error),
        }
    }
}

/// Whether a resolved path lies below a prefix. Prefixes count as they resolve: an allowed `/data` that is a link allows what it points to.
pub fn below_any(resolved: &Path, prefixes: &[PathBuf]) -> bool {
    prefixes.iter().any(|prefix| resolve_existing(prefix).is_ok_and(|prefix| resolved.starts_with(prefix)))
}

/// Opens a path step by step, following no link at any of them, and makes the directories that are missing. The path must be absolute and
/// resolved, as [`resolve_existing`] returns it; what is opened is then what was judged.
///
/// # Errors
/// `ELOOP` or `ENOTDIR` when a link has come into the path.
pub fn open(path: &Path) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let resolve = ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let mut at = rustix::fs::open("/", flags | OFlags::DIRECTORY, Mode::empty())?;
    for component in path.components() {
        let name = match component {
            Component::RootDir => continue,
            Component::Normal(name) => name,
            _ => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let open = || {
            rustix::io::retry_on_intr(|| rustix::fs::openat2(at.as_fd(), name, flags, Mode::empty(), resolve))
        };
        at = match open() {
            Err(rustix::io::Errno::NOENT) => {
                match rustix::fs::mkdirat(at.as_fd(), name, Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(rustix::io::Errno::EXIST) => {}
                    Err(e) => return Err(e.into()),
                }
                open()?
            }
            opened => opened?,
        };
    }
    Ok(at)
}
