//! The file system of a session, put together by its init before user code exists.
//!
//! Order: the box's root read-only, `/tmp`, `/run`, `/dev`, workspaces (shallow ones first), the place of overlays
//! hidden, binds, `/proc`. Sources are opened before the roots are exchanged, without following links, so that what
//! is mounted is what was checked.
//! Invariant: nothing mounted here shows in any other namespace.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MountPropagationFlags, MoveMountFlags,
    OpenTreeFlags, UnmountFlags, fsconfig_create, fsconfig_set_flag, fsconfig_set_string, fsmount, fsopen,
    mount, mount_change, move_mount, open_tree, unmount,
};
use rustix::process::{chdir, fchdir, pivot_root};

use super::during;
use crate::isolated::plan::{Access, PIPES, Plan, View};
use crate::kernel;

const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];
const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];
/// A fresh `/proc` shows the kernel's own settings; to the box's root they may be writable. At least what boxes of the embedded runtime
/// do not see (`crates/shim/src/launch/mounts.rs`).
const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const MASKED: [&str; 10] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
];
const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);
const CLONE: OpenTreeFlags = OpenTreeFlags::OPEN_TREE_CLONE.union(OpenTreeFlags::OPEN_TREE_CLOEXEC);

/// What is mounted from here on stays here.
pub(super) fn make_private() -> io::Result<()> {
    Ok(mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?)
}

/// Exchanges the root for the session's.
pub(super) fn assemble(plan: &Plan) -> io::Result<()> {
    make_places(plan)?;
    let root = open_tree(CWD, "/", CLONE | OpenTreeFlags::AT_RECURSIVE)
        .map_err(io::Error::from)
        .map_err(during("root"))?;
    let shared_tmp = if plan.own_tmp || !Path::new("/tmp").is_dir() {
        None
    } else {
        Some(clone_path(Path::new("/tmp")).map_err(during("/tmp"))?)
    };
    let devices: Vec<(&str, OwnedFd)> = DEVICES
        .iter()
        .filter_map(|name| Some((*name, open_tree(CWD, format!("/dev/{name}"), CLONE).ok()?)))
        .collect();
    // All are opened before the first overlay covers a directory with what it writes to.
    let opened: Vec<(&View, OwnedFd)> = plan
        .workspaces
        .iter()
        .chain(&plan.binds)
        .map(|view| Ok((view, open_source(&view.source).map_err(|e| about(&view.source, &e))?)))
        .collect::<io::Result<_>>()?;
    let mut uppers = Uppers { plan, memory: None, count: 0 };
    let mut views: Vec<(&View, OwnedFd)> = opened
        .iter()
        .map(|(view, source)| {
            Ok((*view, show(source, view, &mut uppers).map_err(|e| about(&view.source, &e))?))
        })
        .collect::<io::Result<_>>()?;
    let binds = views.split_off(plan.workspaces.len());
    kernel::set_read_only(root.as_fd()).map_err(during("read-only root"))?;
    let old_root = exchange(&root).map_err(during("root"))?;
    temporary(shared_tmp)?;
    fresh("tmpfs", "/run", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=755"))?;
    fill_dev(devices)?;
    for (view, mount) in views {
        attach_at(&mount, &view.target)?;
    }
    if plan.upper_root.is_dir() {
        let place = plan.upper_root.to_string_lossy().into_owned();
        fresh("tmpfs", &place, SAFE | MountFlags::RDONLY, Some(c"mode=700,size=4k"))?;
    }
    for (view, mount) in binds {
        attach_at(&mount, &view.target)?;
    }
    fresh("proc", "/proc", SAFE, None)?;
    mask()?;
    fchdir(&old_root)?;
    unmount(".", UnmountFlags::DETACH).map_err(io::Error::from).map_err(during("old root"))?;
    chdir("/")?;
    make_pipes(plan).map_err(during(PIPES))
}

/// Mount points that the read-only root will lack. In the box itself, as a bind of a container engine would.
fn make_places(plan: &Plan) -> io::Result<()> {
    for needed in ["/run", "/dev", "/proc"] {
        if !Path::new(needed).is_dir() {
            fs::create_dir(needed).map_err(|e| about(Path::new(needed), &e))?;
        }
    }
    for view in &plan.binds {
        let inside = plan.workspaces.iter().any(|at| view.target.starts_with(&at.target));
        if plan.is_fresh(&view.target) || inside || view.target.exists() {
            continue;
        }
        make_place(&view.target, view.source.is_dir())?;
    }
    Ok(())
}

fn make_place(target: &Path, directory: bool) -> io::Result<()> {
    let made = match target.parent().filter(|_| !directory) {
        None => fs::create_dir_all(target),
        Some(parent) => fs::create_dir_all(parent).and_then(|()| File::create(target).map(drop)),
    };
    made.map_err(|e| about(target, &e))
}

fn open_source(path: &Path) -> io::Result<OwnedFd> {
    Ok(openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty(), ResolveFlags::NO_SYMLINKS)?)
}

/// A detached mount of what the view says.
fn show(source: &OwnedFd, view: &View, uppers: &mut Uppers<'_>) -> io::Result<OwnedFd> {
    match view.access {
        Access::Overlay => return uppers.overlay(source, Medium::Disk),
        Access::Scratch => return uppers.overlay(source, Medium::Memory),
        Access::Write | Access::Read => {}
    }
    let flags = CLONE | OpenTreeFlags::AT_EMPTY_PATH | OpenTreeFlags::AT_RECURSIVE;
    let mount = open_tree(source, "", flags)?;
    if view.access == Access::Read {
        kernel::set_read_only(mount.as_fd())?;
    }
    Ok(mount)
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Medium {
    Disk,
    Memory,
}

/// Where the overlays of this session keep what is written.
struct Uppers<'a> {
    plan: &'a Plan,
    /// Somewhere in the old root, which nobody sees once it is gone.
    memory: Option<PathBuf>,
    count: usize,
}

impl Uppers<'_> {
    /// A layer that lies on an overlay itself cannot be on top of one: then memory has to do.
    fn overlay(&mut self, lower: &OwnedFd, medium: Medium) -> io::Result<OwnedFd> {
        self.count += 1;
        let name = self.count.to_string();
        if medium == Medium::Disk {
            let place = self.plan.upper.join(&name);
            let mounted = self.layer(&place, lower).and_then(|()| overlay(lower, &place));
            if let Ok(mounted) = mounted {
                return Ok(mounted);
            }
        }
        let place = self.memory()?.join(&name);
        self.layer(&place, lower)?;
        overlay(lower, &place)
    }

    /// The top directory looks like the one below it.
    fn layer(&self, place: &Path, lower: &OwnedFd) -> io::Result<()> {
        let upper = place.join("upper");
        fs::create_dir_all(&upper)?;
        fs::create_dir_all(place.join("work"))?;
        let below = rustix::fs::fstat(lower)?;
        chown(&upper, Some(below.st_uid), Some(below.st_gid))?;
        fs::set_permissions(&upper, fs::Permissions::from_mode(below.st_mode & 0o7777))
    }

    fn memory(&mut self) -> io::Result<PathBuf> {
        if let Some(place) = &self.memory {
            return Ok(place.clone());
        }
        let place = ["/run", "/tmp"].map(Path::new).into_iter().find(|path| path.is_dir());
        let place = place.ok_or_else(|| io::Error::other("neither /run nor /tmp exists"))?;
        let size = CString::new(format!("mode=700,size={}", self.plan.upper_max_bytes))?;
        mount("tmpfs", place, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, Some(&*size))?;
        self.memory = Some(place.to_owned());
        Ok(place.to_owned())
    }
}

fn overlay(lower: &OwnedFd, place: &Path) -> io::Result<OwnedFd> {
    let context = fsopen("overlay", FsOpenFlags::FSOPEN_CLOEXEC)?;
    // By descriptor: the path may be covered by now, and colons in it would need escapes.
    fsconfig_set_string(context.as_fd(), "lowerdir", format!("/proc/self/fd/{}", lower.as_raw_fd()))?;
    fsconfig_set_string(context.as_fd(), "upperdir", place.join("upper"))?;
    fsconfig_set_string(context.as_fd(), "workdir", place.join("work"))?;
    if !owns_all_ids() {
        // The other kind of attributes belongs to the machine's root.
        fsconfig_set_flag(context.as_fd(), "userxattr")?;
    }
    // Nobody needs it after a crash; a kernel without it only takes longer.
    let _ = fsconfig_set_flag(context.as_fd(), "volatile");
    fsconfig_create(context.as_fd())?;
    Ok(fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::MOUNT_ATTR_NODEV)?)
}

/// Whether this is the machine's own user namespace.
fn owns_all_ids() -> bool {
    let map = fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    map.split_whitespace().eq(["0", "0", "4294967295"])
}

fn clone_path(path: &Path) -> io::Result<OwnedFd> {
    Ok(open_tree(CWD, path, CLONE | OpenTreeFlags::AT_RECURSIVE)?)
}

/// Puts the new root over the old one and exchanges them; returns the old one.
fn exchange(root: &OwnedFd) -> io::Result<OwnedFd> {
    let old_root = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    attach(root.as_fd(), Path::new("/"))?;
    fchdir(root)?;
    pivot_root(".", ".")?;
    Ok(old_root)
}

fn temporary(shared: Option<OwnedFd>) -> io::Result<()> {
    let place = Path::new("/tmp");
    match shared {
        Some(mount) => attach(mount.as_fd(), place),
        None if place.is_dir() => {
            fresh("tmpfs", "/tmp", MountFlags::NOSUID | MountFlags::NODEV, Some(c"mode=1777"))
        }
        None => Ok(()),
    }
}

fn fill_dev(devices: Vec<(&str, OwnedFd)>) -> io::Result<()> {
    fresh("tmpfs", "/dev", MountFlags::NOSUID | MountFlags::NOEXEC, Some(c"mode=755,size=1m"))?;
    for (name, device) in devices {
        let place = Path::new("/dev").join(name);
        File::create(&place)?;
        attach(device.as_fd(), &place)?;
    }
    // A box without devices: nothing to read from is the part of it that shells need.
    if !Path::new("/dev/null").exists() {
        File::create("/dev/null")?.set_permissions(fs::Permissions::from_mode(0o666))?;
    }
    for (to, place) in LINKS {
        symlink(to, place)?;
    }
    fs::create_dir("/dev/pts")?;
    fs::create_dir("/dev/shm")?;
    let terminals = c"newinstance,ptmxmode=0666,mode=0620";
    // Not every kernel lets a box have terminals of its own.
    let _ = fresh("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, Some(terminals));
    fresh("tmpfs", "/dev/shm", SAFE, Some(c"mode=1777"))
}

/// What must not be seen or changed in the fresh `/proc`.
fn mask() -> io::Result<()> {
    for path in MASKED.map(Path::new) {
        match fs::symlink_metadata(path) {
            Ok(found) if found.is_dir() => {
                let place = path.to_string_lossy();
                fresh("tmpfs", &place, SAFE | MountFlags::RDONLY, Some(c"mode=755,size=4k"))?;
            }
            Ok(_) => {
                attach(clone_path(Path::new("/dev/null"))?.as_fd(), path).map_err(|e| about(path, &e))?
            }
            Err(_) => {}
        }
    }
    for path in READ_ONLY.map(Path::new).into_iter().filter(|path| path.exists()) {
        let view = clone_path(path).map_err(|e| about(path, &e))?;
        kernel::set_read_only(view.as_fd()).map_err(|e| about(path, &e))?;
        attach(view.as_fd(), path).map_err(|e| about(path, &e))?;
    }
    Ok(())
}

/// The directory of the shell's pipes, the session's user's own.
fn make_pipes(plan: &Plan) -> io::Result<()> {
    fs::create_dir(PIPES)?;
    if !plan.own_users {
        chown(PIPES, Some(plan.uid), Some(plan.gid))?;
    }
    fs::set_permissions(PIPES, fs::Permissions::from_mode(0o700))
}

fn attach_at(mount: &OwnedFd, target: &Path) -> io::Result<()> {
    if !target.exists() {
        let kind = rustix::fs::fstat(mount).map(|s| rustix::fs::FileType::from_raw_mode(s.st_mode))?;
        make_place(target, kind == rustix::fs::FileType::Directory)?;
    }
    attach(mount.as_fd(), target).map_err(|e| about(target, &e))
}

fn attach(mount: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    Ok(move_mount(mount, "", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

fn fresh(kind: &str, place: &str, flags: MountFlags, data: Option<&std::ffi::CStr>) -> io::Result<()> {
    mount(kind, place, kind, flags, data).map_err(|e| about(Path::new(place), &e.into()))
}

fn about(place: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", place.display()))
}
