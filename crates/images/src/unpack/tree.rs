//! The directory a layer is unpacked into, addressed by descriptors so that nothing can lead out of it.
//!
//! Owns path resolution, creation and replacement. Invariant: every parent is opened with `openat2` beneath the root
//! and without following links; the last component is never followed either. A link or file that stands where a
//! directory must be is replaced by one, inside this layer only.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use rustix::fs::{
    AtFlags, FileType, Gid, Mode, OFlags, ResolveFlags, Stat, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::error::ImageError;
use crate::tar_reader::Entry;

const MAX_COMPONENT: usize = 255;
const MAX_PATH: usize = 4095;

/// A path inside the tree, checked: no `..`, no empty or overlong component, not absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TreePath {
    components: Vec<CString>,
}

impl TreePath {
    pub(crate) fn parse(path: &[u8], max_depth: usize) -> Result<Self, ImageError> {
        let refuse = |why: &str| {
            let shown: String = String::from_utf8_lossy(path).chars().take(200).collect();
            Err(ImageError::Corrupt(format!("path {shown:?} {why}")))
        };
        if path.len() > MAX_PATH {
            return refuse("is too long");
        }
        if path.starts_with(b"/") {
            return refuse("is absolute");
        }
        let mut components = Vec::new();
        for part in path.split(|&b| b == b'/') {
            match part {
                b"" | b"." => {}
                b".." => return refuse("leads out of the layer"),
                _ if part.len() > MAX_COMPONENT => return refuse("has a name that is too long"),
                _ => match CString::new(part) {
                    Ok(part) => components.push(part),
                    Err(_) => return refuse("contains a zero byte"),
                },
            }
        }
        if components.len() > max_depth {
            return refuse("is nested too deeply");
        }
        Ok(Self { components })
    }

    pub(crate) fn components(&self) -> &[CString] {
        &self.components
    }

    /// Splits off the name; nothing when this is the root.
    pub(crate) fn split(&self) -> Option<(&[CString], &CString)> {
        self.components.split_last().map(|(name, parent)| (parent, name))
    }
}

pub(crate) fn join(components: &[CString]) -> Vec<u8> {
    components.iter().map(|c| c.to_bytes()).collect::<Vec<_>>().join(&b'/')
}

/// An open directory of the tree and a name in it.
#[derive(Clone)]
pub(crate) struct Place {
    parent: Rc<OwnedFd>,
    name: CString,
}

impl Place {
    pub(crate) fn stat(&self) -> Result<Option<Stat>, ImageError> {
        match rustix::fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(e) => Err(self.failed("looking at", e)),
        }
    }

    pub(crate) fn failed(&self, doing: &str, error: Errno) -> ImageError {
        let name = self.name.to_string_lossy();
        match error {
            Errno::NAMETOOLONG | Errno::ILSEQ => {
                ImageError::Corrupt(format!("a name the file system refuses: {name:?}"))
            }
            _ => ImageError::io(format!("{doing} {name:?} in a layer"), error),
        }
    }

    /// A path to the place for calls that take no directory descriptor; the last component is not followed by them.
    fn proc_path(&self) -> PathBuf {
        use std::os::unix::ffi::OsStrExt as _;
        let name = std::ffi::OsStr::from_bytes(self.name.to_bytes());
        Path::new("/proc/self/fd").join(self.parent.as_raw_fd().to_string()).join(name)
    }
}

pub(crate) struct Tree {
    root: Rc<OwnedFd>,
    /// Whether owners, devices and trusted attributes can be set.
    privileged: bool,
    last_parent: Option<(Vec<u8>, Rc<OwnedFd>)>,
}

impl Tree {
    pub(crate) fn open(root: &Path) -> Result<Self, ImageError> {
        let fd = rustix::fs::open(root, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
            .map_err(|e| ImageError::io(format!("opening {}", root.display()), e))?;
        let privileged = rustix::process::geteuid().is_root();
        Ok(Self { root: Rc::new(fd), privileged, last_parent: None })
    }

    pub(crate) fn privileged(&self) -> bool {
        self.privileged
    }

    /// Opens an existing directory without following any link; nothing if there is none.
    pub(crate) fn open_directory(
        &self,
        components: &[CString],
        flags: OFlags,
    ) -> Result<Option<OwnedFd>, ImageError> {
        let path = if components.is_empty() { b".".to_vec() } else { join(components) };
        match open_beneath(self.root.as_fd(), &path, flags) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT | Errno::LOOP | Errno::NOTDIR) => Ok(None),
            Err(e) => Err(resolve_failed(&path, e)),
        }
    }

    /// Finds the place of a path, making the directories above it.
    pub(crate) fn place(&mut self, parent: &[CString], name: &CString) -> Result<Place, ImageError> {
        let key = join(parent);
        if let Some((_, fd)) = self.last_parent.as_ref().filter(|(last, _)| *last == key) {
            return Ok(Place { parent: Rc::clone(fd), name: name.clone() });
        }
        let fd = match self.open_directory(parent, OFlags::PATH)? {
            Some(fd) => Rc::new(fd),
            None => self.make_parents(parent)?,
        };
        self.last_parent = Some((key, Rc::clone(&fd)));
        Ok(Place { parent: fd, name: name.clone() })
    }

    /// Finds the place of a path whose parents must exist already.
    pub(crate) fn existing_place(&self, path: &TreePath) -> Result<Option<Place>, ImageError> {
        let Some((parent, name)) = path.split() else {
            return Ok(None);
        };
        let fd = self.open_directory(parent, OFlags::PATH)?;
        Ok(fd.map(|fd| Place { parent: Rc::new(fd), name: name.clone() }))
    }

    fn make_parents(&mut self, parent: &[CString]) -> Result<Rc<OwnedFd>, ImageError> {
        let mut current = Rc::clone(&self.root);
        for name in parent {
            let place = Place { parent: Rc::clone(&current), name: name.clone() };
            self.ensure_directory(&place)?;
            let fd = open_beneath(current.as_fd(), name.to_bytes(), OFlags::PATH)
                .map_err(|e| resolve_failed(name.to_bytes(), e))?;
            current = Rc::new(fd);
        }
        Ok(current)
    }

    /// Makes a directory, replacing anything else that is there.
    pub(crate) fn ensure_directory(&mut self, place: &Place) -> Result<(), ImageError> {
        let mut hides_lower = false;
        match place.stat()? {
            Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => return Ok(()),
            Some(stat) => {
                hides_lower = is_whiteout(&stat);
                self.clear(place)?;
            }
            None => {}
        }
        rustix::fs::mkdirat(&place.parent, &place.name, Mode::from_raw_mode(0o755))
            .map_err(|e| place.failed("making directory", e))?;
        rustix::fs::chmodat(&place.parent, &place.name, Mode::from_raw_mode(0o755), AtFlags::empty())
            .map_err(|e| place.failed("making directory", e))?;
        if hides_lower { self.set_opaque(&place.proc_path()) } else { Ok(()) }
    }

    /// Removes whatever is at the place.
    pub(crate) fn clear(&mut self, place: &Place) -> Result<(), ImageError> {
        let Some(stat) = place.stat()? else {
            return Ok(());
        };
        if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
            // The remembered parent may be inside.
            self.last_parent = None;
            let path = place.proc_path();
            return std::fs::remove_dir_all(path)
                .map_err(|e| ImageError::io("replacing a directory in a layer", e));
        }
        rustix::fs::unlinkat(&place.parent, &place.name, AtFlags::empty())
            .map_err(|e| place.failed("replacing", e))
    }

    pub(crate) fn create_file(&mut self, place: &Place) -> Result<File, ImageError> {
        self.clear(place)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = rustix::fs::openat(&place.parent, &place.name, flags, Mode::from_raw_mode(0o600))
            .map_err(|e| place.failed("creating", e))?;
        Ok(File::from(fd))
    }

    pub(crate) fn hard_link(&mut self, from: &Place, to: &Place) -> Result<(), ImageError> {
        self.clear(to)?;
        match rustix::fs::linkat(&from.parent, &from.name, &to.parent, &to.name, AtFlags::empty()) {
            Err(Errno::NOENT) => Err(ImageError::corrupt("a hard link to a file that is not in the layer")),
            other => other.map_err(|e| to.failed("linking", e)),
        }
    }

    pub(crate) fn symlink(&mut self, target: &[u8], place: &Place) -> Result<(), ImageError> {
        if target.is_empty() || target.len() > MAX_PATH || target.contains(&0) {
            return Err(ImageError::corrupt(
                "a symbolic link whose target is empty, too long or has a zero byte",
            ));
        }
        self.clear(place)?;
        rustix::fs::symlinkat(target, &place.parent, &place.name).map_err(|e| place.failed("linking", e))
    }

    pub(crate) fn node(
        &mut self,
        kind: FileType,
        device: (u32, u32),
        place: &Place,
    ) -> Result<(), ImageError> {
        self.clear(place)?;
        let device = rustix::fs::makedev(device.0, device.1);
        rustix::fs::mknodat(&place.parent, &place.name, kind, Mode::from_raw_mode(0o600), device)
            .map_err(|e| place.failed("making node", e))
    }

    /// Hides what lower layers have at the place, unless this layer has something there itself.
    pub(crate) fn whiteout(&mut self, place: &Place) -> Result<(), ImageError> {
        match place.stat()? {
            None => self.node(FileType::CharacterDevice, (0, 0), place),
            Some(stat) if FileType::from_raw_mode(stat.st_mode) == FileType::Directory => {
                self.set_opaque(&place.proc_path())
            }
            Some(_) => Ok(()),
        }
    }

    /// Marks the directory so that lower layers do not show through it.
    pub(crate) fn opaque(&mut self, directory: &[CString]) -> Result<(), ImageError> {
        match directory.split_last() {
            Some((name, parent)) => {
                let place = self.place(parent, name)?;
                self.ensure_directory(&place)?;
                self.set_opaque(&place.proc_path())
            }
            None => Ok(()),
        }
    }

    fn set_opaque(&self, path: &Path) -> Result<(), ImageError> {
        // The overlay is mounted by the host's root, which reads the trusted name.
        let name = if self.privileged { "trusted.overlay.opaque" } else { "user.overlay.opaque" };
        rustix::fs::lsetxattr(path, name, b"y", XattrFlags::empty()).map_err(|e| match e {
            Errno::OPNOTSUPP | Errno::PERM => {
                ImageError::Unsupported(format!("layers on this file system: it cannot store {name}"))
            }
            _ => ImageError::io("marking a directory as opaque", e),
        })
    }

    /// Sets owner, mode, attributes and time, in the order in which the kernel does not undo them.
    pub(crate) fn apply_metadata(&self, place: &Place, entry: &Entry) -> Result<(), ImageError> {
        let is_link = entry.kind == crate::tar_reader::EntryKind::Symlink;
        if self.privileged {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            rustix::fs::chownat(&place.parent, &place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)
                .map_err(|e| place.failed("setting the owner of", e))?;
        }
        if !is_link {
            let mode = Mode::from_raw_mode(entry.mode & 0o7777);
            rustix::fs::chmodat(&place.parent, &place.name, mode, AtFlags::empty())
                .map_err(|e| place.failed("setting the mode of", e))?;
        }
        for (name, value) in &entry.xattrs {
            self.set_xattr(&place.proc_path(), name, value)?;
        }
        rustix::fs::utimensat(&place.parent, &place.name, &times(entry.mtime), AtFlags::SYMLINK_NOFOLLOW)
            .map_err(|e| place.failed("setting the time of", e))
    }

    /// The same for the tree's root.
    pub(crate) fn apply_root_metadata(&self, entry: &Entry) -> Result<(), ImageError> {
        let path = PathBuf::from(format!("/proc/self/fd/{}", self.root.as_raw_fd())).join(".");
        if self.privileged {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            rustix::fs::chownat(&self.root, ".", Some(uid), Some(gid), AtFlags::empty())
                .map_err(|e| ImageError::io("setting the owner of a layer's root", e))?;
        }
        entry.xattrs.iter().try_for_each(|(name, value)| self.set_xattr(&path, name, value))
    }

    fn set_xattr(&self, path: &Path, name: &[u8], value: &[u8]) -> Result<(), ImageError> {
        if !keeps_xattr(name) {
            return Ok(());
        }
        let name =
            CString::new(name).map_err(|_| ImageError::corrupt("an attribute name with a zero byte"))?;
        match rustix::fs::lsetxattr(path, &name, value, XattrFlags::empty()) {
            // Links cannot have user attributes, and not every file system has the others; Docker goes on, too.
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::PERM) => Ok(()),
            Err(Errno::INVAL | Errno::RANGE | Errno::TOOBIG) => {
                Err(ImageError::corrupt("a malformed attribute"))
            }
            Err(e) => Err(ImageError::io("setting an attribute in a layer", e)),
        }
    }

    /// Sets a directory's mode and time once nothing more will be written into it.
    pub(crate) fn finish_directory(
        &self,
        path: &[CString],
        mode: u32,
        mtime: (i64, u32),
    ) -> Result<(), ImageError> {
        // Something later in the archive may have replaced it.
        let Some(fd) = self.open_directory(path, OFlags::RDONLY)? else {
            return Ok(());
        };
        rustix::fs::fchmod(&fd, Mode::from_raw_mode(mode & 0o7777))
            .and_then(|()| rustix::fs::futimens(&fd, &times(mtime)))
            .map_err(|e| ImageError::io("finishing a directory in a layer", e))
    }
}

/// What may come out of an archive: not overlayfs' own marks, which would let a layer reach into others, and no labels
/// of another host's security modules.
fn keeps_xattr(name: &[u8]) -> bool {
    let overlay = name.starts_with(b"trusted.overlay.") || name.starts_with(b"user.overlay.");
    let foreign = name.starts_with(b"security.") && name != b"security.capability";
    !overlay && !foreign
}

pub(crate) fn is_whiteout(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice && stat.st_rdev == 0
}

fn times(mtime: (i64, u32)) -> Timestamps {
    let time = Timespec { tv_sec: mtime.0, tv_nsec: mtime.1.into() };
    Timestamps { last_access: time, last_modification: time }
}

fn open_beneath(root: BorrowedFd<'_>, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH
        | ResolveFlags::NO_SYMLINKS
        | ResolveFlags::NO_MAGICLINKS
        | ResolveFlags::NO_XDEV;
    let flags = flags | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    rustix::io::retry_on_intr(|| rustix::fs::openat2(root, path, flags, Mode::empty(), resolve))
}

fn resolve_failed(path: &[u8], error: Errno) -> ImageError {
    let path: String = String::from_utf8_lossy(path).chars().take(200).collect();
    match error {
        Errno::NOSYS => {
            ImageError::Unsupported("unpacking needs openat2, which came with Linux 5.6".to_owned())
        }
        Errno::XDEV | Errno::NAMETOOLONG => {
            ImageError::Corrupt(format!("path {path:?} leads out of the layer"))
        }
        _ => ImageError::io(format!("opening {path:?} in a layer"), error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hostile_paths_are_refused() {
        let long = "a/".repeat(3000);
        let deep = "a/".repeat(300);
        let name = "n".repeat(256);
        for path in ["/etc/passwd", "..", "a/../b", "a/..", "../../x", "a\0b", &long, &deep, &name] {
            assert!(TreePath::parse(path.as_bytes(), 256).is_err(), "{path:?}");
        }
        let path = TreePath::parse(b"./a//b/./c/", 256).unwrap();
        assert_eq!(join(path.components()), b"a/b/c");
        assert!(TreePath::parse(b"./", 256).unwrap().split().is_none());
    }

    #[test]
    fn overlay_marks_and_foreign_labels_are_dropped() {
        for name in ["trusted.overlay.redirect", "user.overlay.opaque", "security.selinux"] {
            assert!(!keeps_xattr(name.as_bytes()), "{name}");
        }
        for name in ["user.mime", "security.capability", "system.posix_acl_access"] {
            assert!(keeps_xattr(name.as_bytes()), "{name}");
        }
    }
}
