//! What is mounted inside the box, by the box's first process: `/proc`, `/sys`, `/dev`, masks.
//!
//! The new root is entered first and the rest mounted from inside, so that a link in the image can lead nowhere else.
//! The old root stays reachable until the end, because the kernel allows a fresh `/proc` or `/sys` only to a
//! namespace that still sees an unmasked one.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{CWD, Mode, OFlags, open};
use rustix::io::Errno;
use rustix::mount::{MountFlags, OpenTreeFlags, UnmountFlags, mount, mount_remount, open_tree, unmount};
use rustix::process::{fchdir, pivot_root};

use super::Plan;
use crate::kernel::mounts::{RDONLY, Reach, attach, set_attributes};

const DEVICES: [&str; 6] = ["null", "zero", "full", "random", "urandom", "tty"];

const LINKS: [(&str, &str); 5] = [
    ("/proc/self/fd", "/dev/fd"),
    ("/proc/self/fd/0", "/dev/stdin"),
    ("/proc/self/fd/1", "/dev/stdout"),
    ("/proc/self/fd/2", "/dev/stderr"),
    ("pts/ptmx", "/dev/ptmx"),
];

/// Hidden, as Docker hides them. Absent ones are skipped.
pub const MASKED: [&str; 12] = [
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
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];

pub const READ_ONLY: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];

const SAFE: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// Turns the working directory, the merged root, into `/` and fills it.
pub fn assemble(plan: &Plan<'_>) -> io::Result<()> {
    let devices: Vec<(&str, OwnedFd)> =
        DEVICES.iter().map(|name| Ok((*name, clone(&format!("/dev/{name}"))?))).collect::<io::Result<_>>()?;
    let old_root = enter()?;
    fresh("proc", "/proc", SAFE, None)?;
    fresh("sysfs", "/sys", SAFE | MountFlags::RDONLY, None)?;
    fill_dev(plan, devices)?;
    show_cgroups(plan).map_err(|error| about("/sys/fs/cgroup", &error))?;
    mask()?;
    fchdir(&old_root)?;
    unmount(".", UnmountFlags::DETACH)?;
    Ok(rustix::process::chdir("/")?)
}

/// Puts the merged root over itself, because the kernel has locked it in this namespace and pivots only to a mount
/// that is not; then exchanges the roots. Returns the old one.
fn enter() -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
    let root = open_tree(CWD, ".", flags).map_err(|error| about("merged root", &error.into()))?;
    attach(root.as_fd(), CWD, Path::new("."))?;
    let old_root = open("/", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    fchdir(&root)?;
    pivot_root(".", ".").map_err(|error| about("pivot_root", &error.into()))?;
    Ok(old_root)
}

fn fill_dev(plan: &Plan<'_>, devices: Vec<(&str, OwnedFd)>) -> io::Result<()> {
    use std::ffi::CStr;
    let dev = MountFlags::NOSUID | MountFlags::NOEXEC;
    let data: &CStr = c"mode=755,size=1m";
    fresh("tmpfs", "/dev", dev, Some(data))?;
    for (name, device) in devices {
        let place = format!("/dev/{name}");
        File::create(&place)?;
        attach(device.as_fd(), CWD, Path::new(&place)).map_err(|error| about(&place, &error))?;
    }
    for (to, place) in LINKS {
        symlink(to, place)?;
    }
    for name in ["/dev/pts", "/dev/shm", "/dev/mqueue"] {
        fs::create_dir(name)?;
    }
    let terminals = c"newinstance,ptmxmode=0666,mode=0620,gid=5";
    fresh("devpts", "/dev/pts", MountFlags::NOSUID | MountFlags::NOEXEC, Some(terminals))?;
    fresh("mqueue", "/dev/mqueue", SAFE, None)?;
    // Counts as the box's memory; half of it is what a tmpfs takes by itself on a machine of that size.
    let shm = match plan.spec.limits.memory_bytes {
        Some(bytes) => format!("mode=1777,size={}", (bytes / 2).max(1 << 20)),
        None => "mode=1777".into(),
    };
    let shm = std::ffi::CString::new(shm).map_err(io::Error::other)?;
    fresh("tmpfs", "/dev/shm", SAFE, Some(&shm))
}

/// So that programs find their own limits. The kernel shows each process's group as `/`, which is what lies here.
fn show_cgroups(plan: &Plan<'_>) -> io::Result<()> {
    const PLACE: &str = "/sys/fs/cgroup";
    if !Path::new(PLACE).exists() {
        return Ok(());
    }
    if let [(view, "")] = plan.cgroup_views.as_slice() {
        return attach(view.as_fd(), CWD, Path::new(PLACE));
    }
    fresh("tmpfs", PLACE, SAFE, Some(c"mode=755,size=64k"))?;
    for (view, name) in &plan.cgroup_views {
        let place = format!("{PLACE}/{name}");
        fs::create_dir(&place)?;
        attach(view.as_fd(), CWD, Path::new(&place))?;
    }
    Ok(mount_remount(PLACE, SAFE | MountFlags::RDONLY, c"")?)
}

fn mask() -> io::Result<()> {
    let mut empty: Option<OwnedFd> = None;
    for path in MASKED {
        let Ok(found) = fs::symlink_metadata(path) else { continue };
        if !found.is_dir() {
            attach(clone("/dev/null")?.as_fd(), CWD, Path::new(path)).map_err(|error| about(path, &error))?;
            continue;
        }
        match &empty {
            Some(shown) => attach(clone_of(shown)?.as_fd(), CWD, Path::new(path))?,
            None => {
                fresh("tmpfs", path, SAFE | MountFlags::RDONLY, Some(c"mode=755,size=4k"))?;
                empty = Some(open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty())?);
            }
        }
    }
    for path in READ_ONLY {
        let flags =
            OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_RECURSIVE;
        let view = match open_tree(CWD, path, flags) {
            Err(Errno::NOENT) => continue,
            other => other.map_err(|error| about(path, &error.into()))?,
        };
        set_attributes(view.as_fd(), RDONLY, None, Reach::Subtree).map_err(|error| about(path, &error))?;
        attach(view.as_fd(), CWD, Path::new(path)).map_err(|error| about(path, &error))?;
    }
    Ok(())
}

fn fresh(kind: &str, place: &str, flags: MountFlags, data: Option<&std::ffi::CStr>) -> io::Result<()> {
    mount(kind, place, kind, flags, data).map_err(|error| match error {
        Errno::PERM if matches!(kind, "proc" | "sysfs") => io::Error::new(
            io::ErrorKind::PermissionDenied,
            format!("{place}: {error}: does this server run in a container that masks parts of {place}?"),
        ),
        error => about(place, &error.into()),
    })
}

fn clone(path: &str) -> io::Result<OwnedFd> {
    let flags = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    open_tree(CWD, path, flags).map_err(|error| about(path, &error.into()))
}

fn clone_of(mount: &OwnedFd) -> io::Result<OwnedFd> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    Ok(open_tree(mount, "", flags)?)
}

fn about(place: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{place}: {error}"))
}
