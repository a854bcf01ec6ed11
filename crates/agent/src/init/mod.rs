//! Being PID 1: spawning, reaping, signals and shutdown. With `kernel` and `hardening`, the places of this crate with `unsafe`.

pub mod begin;
pub mod clone3;
pub mod kin;
pub mod reap;
pub mod spawn;
pub mod stop;
pub mod supervise;

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;

use rustix::process::{DumpableBehavior, Resource, Rlimit, getrlimit, setrlimit};
use tokio::io::unix::AsyncFd;

/// Takes ownership of a descriptor the parent left open for us, if it is open.
pub fn adopt_descriptor(fd: RawFd) -> Option<OwnedFd> {
    if fd < 3 {
        return None;
    }
    // SAFETY: F_GETFD has no memory effects; it only tells whether the number is an open descriptor.
    if unsafe { libc::fcntl(fd, libc::F_GETFD) } < 0 {
        return None;
    }
    // SAFETY: open (checked above), above stdio, and named by the boot contract as ours; each is taken once.
    Some(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Has the runtime wait for a descriptor, which must not block any more.
pub fn watch_descriptor(fd: OwnedFd) -> std::io::Result<AsyncFd<OwnedFd>> {
    rustix::io::ioctl_fionbio(&fd, true)?;
    // SAFETY: an owned descriptor stays open and the same until it is dropped, which the result does last.
    Ok(unsafe { AsyncFd::register(fd) }?)
}

static UMASK: OnceLock<u32> = OnceLock::new();
static NOFILE: OnceLock<Rlimit> = OnceLock::new();

/// How long threads for file work are kept. A box at its limit of processes lets no thread be started: as long as there is one already,
/// file work only waits for it; with none the runtime would panic, and PID 1 would be gone.
pub const FOREVER: std::time::Duration = std::time::Duration::from_secs(100 * 365 * 24 * 3600);

/// Numbers of descriptors that only children use. A child is given descriptors by number after the fork, when the
/// standard library holds one of its own under a number nobody knows; so these are taken before anything else can.
pub const RESERVED: [RawFd; 9] = [6, 7, 8, 9, 20, 21, 22, 23, 24];
static PLACEHOLDERS: OnceLock<Vec<OwnedFd>> = OnceLock::new();

fn reserve_descriptors() {
    let Ok(blank) = rustix::fs::memfd_create("reserved", rustix::fs::MemfdFlags::CLOEXEC) else { return };
    let mut taken = Vec::with_capacity(RESERVED.len());
    for number in RESERVED {
        // A higher number means that this one is in use already, by something as old as the process.
        if let Ok(fd) = rustix::io::fcntl_dupfd_cloexec(&blank, number)
            && fd.as_raw_fd() == number
        {
            taken.push(fd);
        }
    }
    let _ = PLACEHOLDERS.set(taken);
}

/// Process-wide settings that must hold before the first request.
pub fn prepare_process() {
    // Keeps /proc/1/environ and ptrace away from workloads running as the same user.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let _ = rustix::thread::set_name(c"execd");
    // Whatever else the parent left open is not for user processes.
    // SAFETY: only sets close-on-exec flags; no descriptor is closed. An old kernel refuses, which is harmless.
    unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    reserve_descriptors();
    let mask = rustix::process::umask(rustix::fs::Mode::empty());
    rustix::process::umask(mask);
    let _ = UMASK.set(mask.bits());
    // Every command costs the agent three descriptors, so it takes all it may have. Programs get the old limit
    // back: many close every number up to it, and `select` breaks beyond 1024.
    let nofile = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: nofile.maximum, maximum: nofile.maximum };
    if nofile.maximum.is_some() && setrlimit(Resource::Nofile, raised).is_ok() {
        let _ = NOFILE.set(nofile);
    }
}

/// What user processes get as their limit of descriptors, when it is not the agent's own.
fn nofile_of_programs() -> Option<libc::rlimit> {
    let limit = NOFILE.get()?;
    Some(libc::rlimit { rlim_cur: limit.current?, rlim_max: limit.maximum? })
}

/// Sets what new files get by upload, whatever the process's own mask is; only before [`prepare_process`].
pub fn set_default_mode(mode: u32) {
    let _ = UMASK.set(0o777 & !mode);
}

/// The mode a new file gets when the caller did not ask for one.
pub fn default_mode() -> u32 {
    0o777 & !UMASK.get().copied().unwrap_or(0o022)
}

/// Outside a pid namespace of our own, orphans would otherwise go to the host's init.
pub fn become_subreaper() {
    let own = rustix::process::getpid();
    let _ = rustix::process::set_child_subreaper(Some(own));
}

pub fn is_pid_one() -> bool {
    std::process::id() == 1
}

/// Sends a signal to every other process of the pid namespace; false when there is none. Only for PID 1.
pub fn signal_everyone(signal: i32) -> bool {
    debug_assert!(is_pid_one());
    // SAFETY: plain system call. As PID 1 of a namespace, -1 means every process in it except ourselves.
    unsafe { libc::kill(-1, signal) == 0 }
}

/// Sends a signal to a process group. False when the group is gone.
pub fn signal_group(group: i32, signal: i32) -> bool {
    if group <= 1 {
        return false;
    }
    // SAFETY: plain system call; `group` is a child we started as a group leader, never 0, 1 or -1.
    unsafe { libc::kill(-group, signal) == 0 }
}

/// Ends this process the way the signal would have, had we not caught it.
pub fn die_by(signal: i32) -> ! {
    // SAFETY: resets the disposition and raises; both are plain calls without pointers to our memory.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        libc::raise(signal);
    }
    std::process::exit(128 + signal)
}
