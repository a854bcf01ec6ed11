//! What the program sees: itself, its two directories, the authorities that it trusts, and nothing else of the host.
//!
//! The shim clones each piece; the program's process, root of nothing but its own namespaces, puts them together.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, chown};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, OpenTreeFlags, UnmountFlags, fsconfig_create,
    fsconfig_set_string, fsmount, fsopen, mount, mount_remount, open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};

use crate::directory::BoxDir;
use crate::kernel::mounts::{NODEV, NOEXEC, NOSUID, RDONLY, Reach, attach, set_attributes};
use crate::spec::EgressSpec;

/// Where the program finds itself.
pub const PROGRAM: &str = "/sandglass-egress";
/// Its own directory: what must survive it lies there.
pub const STATE: &str = "/state";
/// Where it puts the certificate for the box.
pub const AUTHORITY: &str = "/authority";

const DEVICES: [&str; 2] = ["/dev/null", "/dev/urandom"];
const PLAIN: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// The directory of the policy's files in a sandbox directory; root's alone, apart from what is below.
pub fn home(dir: &BoxDir) -> PathBuf {
    dir.join("egress")
}

/// Where the box's view of the authority's certificate comes from.
pub fn authority(dir: &BoxDir) -> PathBuf {
    home(dir).join("authority")
}

/// Makes the directories that the program writes to. There already is fine.
pub fn make_directories(dir: &BoxDir, user: u32) -> io::Result<()> {
    let make = |path: &Path, mode: u32| match fs::DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(about(path, &error)),
        _ => Ok(()),
    };
    // The program's process stands in it for a moment; nobody else comes this far.
    make(&home(dir), 0o711)?;
    let own = [(home(dir).join("state"), 0o700), (authority(dir), 0o755)];
    for (path, mode) in own {
        make(&path, mode)?;
        chown(&path, Some(user), Some(user)).map_err(|error| about(&path, &error))?;
    }
    Ok(())
}

/// Detached mounts and where they go.
#[derive(Debug)]
pub struct View {
    pieces: Vec<(OwnedFd, PathBuf)>,
}

impl View {
    /// Clones the pieces, as the host's root.
    pub fn prepare(dir: &BoxDir, spec: &EgressSpec) -> io::Result<Self> {
        let fixed = NOSUID | NODEV;
        let mut pieces = vec![
            piece(&spec.program, PROGRAM, fixed | RDONLY)?,
            piece(&home(dir).join("state"), STATE, fixed | NOEXEC)?,
            piece(&authority(dir), AUTHORITY, fixed | NOEXEC)?,
        ];
        for device in DEVICES {
            pieces.push(piece(Path::new(device), device, NOSUID | NOEXEC)?);
        }
        for bind in &spec.views {
            let target = bind.target.to_string_lossy();
            pieces.push(piece(&bind.source, &target, fixed | NOEXEC | RDONLY)?);
        }
        Ok(Self { pieces })
    }

    /// Makes the pieces the whole file system of this process, whose working directory is hidden under it first.
    pub fn enter(&self) -> io::Result<()> {
        let root = small_file_system()?;
        attach(root.as_fd(), CWD, Path::new("."))?;
        let old = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        fchdir(&root)?;
        pivot_root(".", ".")?;
        for (mounted, target) in &self.pieces {
            self.put(mounted, target).map_err(|error| about(target, &error))?;
        }
        fs::create_dir("/proc")?;
        mount("proc", "/proc", "proc", PLAIN, None)
            .map_err(|error| about(Path::new("/proc"), &error.into()))?;
        mount_remount("/", PLAIN | MountFlags::RDONLY, c"")?;
        fchdir(&old)?;
        unmount(".", UnmountFlags::DETACH)?;
        Ok(chdir("/")?)
    }

    fn put(&self, mounted: &OwnedFd, target: &Path) -> io::Result<()> {
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)?;
        }
        if File::from(mounted.try_clone()?).metadata()?.is_dir() {
            fs::create_dir_all(target)?;
        } else {
            File::create(target)?;
        }
        attach(mounted.as_fd(), CWD, target)
    }
}

fn piece(source: &Path, target: &str, attributes: u64) -> io::Result<(OwnedFd, PathBuf)> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let clone = open_tree(CWD, source, flags).map_err(|error| about(source, &error.into()))?;
    set_attributes(clone.as_fd(), attributes, None, Reach::This)?;
    Ok((clone, target.into()))
}

fn small_file_system() -> io::Result<OwnedFd> {
    let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    for (key, value) in [("size", "64k"), ("mode", "755")] {
        fsconfig_set_string(context.as_fd(), key, value)?;
    }
    fsconfig_create(context.as_fd())?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NODEV;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)?)
}

fn about(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
