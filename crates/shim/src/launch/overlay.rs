//! Overlay mounts over id-mapped layers.
//!
//! The layers lie on disk as the image has them (owner 0 and so on). Each is shown to the overlay through a mount that
//! adds the box's base to every id; the upper directory is written with the shifted ids themselves. Older kernels
//! want a layer to be mounted somewhere, so they are put, numbered, into a tmpfs where the merged root will cover them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::CWD;
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, OpenTreeFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, mount, open_tree,
};

use crate::kernel::mounts::{NODEV, RDONLY, Reach, attach, set_attributes};

/// One overlay to be.
#[derive(Debug)]
pub struct Overlay<'a> {
    /// Top first.
    pub lowers: &'a [PathBuf],
    pub upper: &'a Path,
    pub work: &'a Path,
}

/// `redirect_dir` off: a layer of hostile origin must not point elsewhere. `volatile`: nobody waits for disks, and
/// after a crash of the machine the box is gone anyway.
const FLAGS: [&str; 1] = ["volatile"];
const STRINGS: [(&str, &str); 5] =
    [("redirect_dir", "nofollow"), ("index", "off"), ("xino", "off"), ("metacopy", "off"), ("uuid", "null")];

/// Mounts a small file system at `place` and shows every layer in it with the box's ids; returns where each lies.
pub fn map_layers(lowers: &[&Path], place: &Path, userns: BorrowedFd<'_>) -> io::Result<Vec<PathBuf>> {
    mount("tmpfs", place, "tmpfs", MountFlags::NODEV, Some(c"mode=700,size=64k"))?;
    let show = |(number, lower): (usize, &&Path)| {
        let clone = clone_mapped(lower, userns)?;
        let shown = place.join(number.to_string());
        std::fs::create_dir(&shown)?;
        attach(clone.as_fd(), CWD, &shown).map_err(|error| about(lower, &error))?;
        Ok(shown)
    };
    lowers.iter().enumerate().map(show).collect()
}

fn clone_mapped(path: &Path, userns: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, path, flags).map_err(|error| about(path, &error.into()))?;
    set_attributes(clone.as_fd(), RDONLY | NODEV, Some(userns), Reach::This).map_err(|error| {
        let hint = match error.raw_os_error() {
            Some(libc::EINVAL) => "the file system does not support id-mapped mounts",
            _ => "cannot map ids",
        };
        io::Error::new(error.kind(), format!("{}: {hint}: {error}", path.display()))
    })?;
    Ok(clone)
}

/// Mounts the overlay, not yet attached anywhere.
pub fn create(overlay: &Overlay<'_>) -> io::Result<OwnedFd> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for lower in overlay.lowers {
        match fsconfig_set_string(context.as_fd(), "lowerdir+", lower.as_path()) {
            // Kernels before 6.8 do not know the key.
            Err(Errno::INVAL) => return create_with_option_string(overlay),
            other => other.map_err(|error| about(lower, &error.into()))?,
        }
    }
    fsconfig_set_string(context.as_fd(), "upperdir", overlay.upper)?;
    fsconfig_set_string(context.as_fd(), "workdir", overlay.work)?;
    for flag in FLAGS {
        fsconfig_set_flag(context.as_fd(), flag)?;
    }
    for (key, value) in STRINGS {
        // Options that a kernel was built without do not matter: their default is then what is asked for.
        match fsconfig_set_string(context.as_fd(), key, value) {
            Err(Errno::INVAL) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    fsconfig_create(context.as_fd()).map_err(|error| describe(overlay, error.into()))?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?)
}

/// The old way: all layers in one string, which must fit a page. Mounted over the upper directory and cloned off,
/// so that the caller gets a detached mount either way.
fn create_with_option_string(overlay: &Overlay<'_>) -> io::Result<OwnedFd> {
    let joined: Vec<String> = overlay.lowers.iter().map(|path| escaped(path)).collect();
    let mut options = format!(
        "lowerdir={},upperdir={},workdir={},volatile",
        joined.join(":"),
        escaped(overlay.upper),
        escaped(overlay.work)
    );
    // The last option is younger than the kernels that come here.
    for (key, value) in &STRINGS[..4] {
        options.push_str(&format!(",{key}={value}"));
    }
    if options.len() > 4095 {
        let layers = overlay.lowers.len();
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            format!(
                "{layers} layers do not fit this kernel's mount options: flatten the image or use Linux 6.8"
            ),
        ));
    }
    let options = std::ffi::CString::new(options).map_err(io::Error::other)?;
    mount("overlay", overlay.upper, "overlay", MountFlags::NODEV, Some(&*options))
        .map_err(|error| describe(overlay, error.into()))?;
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, overlay.upper, flags)?;
    rustix::mount::unmount(overlay.upper, rustix::mount::UnmountFlags::DETACH)?;
    Ok(clone)
}

fn escaped(path: &Path) -> String {
    let text = String::from_utf8_lossy(path.as_os_str().as_bytes());
    text.replace('\\', "\\\\").replace(':', "\\:").replace(',', "\\,")
}

fn describe(overlay: &Overlay<'_>, error: io::Error) -> io::Error {
    let layers = overlay.lowers.len();
    io::Error::new(
        error.kind(),
        format!("overlay of {layers} layers over {}: {error}", overlay.upper.display()),
    )
}

fn about(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
