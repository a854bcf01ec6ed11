//! Mounts by descriptor: `mount_setattr`, which rustix lacks, for read-only clones and id-mapped mounts; attaching.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::Path;

use rustix::mount::{MoveMountFlags, move_mount};

pub const RDONLY: u64 = libc::MOUNT_ATTR_RDONLY;
pub const NOSUID: u64 = libc::MOUNT_ATTR_NOSUID;
pub const NODEV: u64 = libc::MOUNT_ATTR_NODEV;
pub const NOEXEC: u64 = libc::MOUNT_ATTR_NOEXEC;

/// Whether mounts below are changed too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    This,
    Subtree,
}

/// Sets attributes of the mount that `mount` is the root of, and maps its ids when a user namespace is given.
pub fn set_attributes(
    mount: BorrowedFd<'_>,
    set: u64,
    ids: Option<BorrowedFd<'_>>,
    reach: Reach,
) -> io::Result<()> {
    let attributes = libc::mount_attr {
        attr_set: set | if ids.is_some() { libc::MOUNT_ATTR_IDMAP } else { 0 },
        attr_clr: 0,
        propagation: 0,
        userns_fd: ids.map_or(0, |fd| fd.as_raw_fd() as u64),
    };
    let recursive = if reach == Reach::Subtree { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is an empty C string, `attributes` lives across the call and its true size is given.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | recursive,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Attaches a detached mount at `path` below `at`, or at `at` itself when the path is empty.
pub fn attach(mount: BorrowedFd<'_>, at: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let mut flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    if path.as_os_str().is_empty() {
        flags |= MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
    }
    Ok(move_mount(mount, "", at, path, flags)?)
}
