//! Processes: fork, clone3, descriptors across exec, signals, keyring.
//!
//! Invariant: [`fork`] and [`clone_child`] are called in single-threaded processes only (zygote and shim never start
//! a thread), so the copy may run ordinary Rust code. The one exception, in `doctor`, runs none.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::Pid;

/// libc's constant does not fit the type it has there.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Side<T> {
    Child,
    Parent(T),
}

/// A child with its handle, which stays valid when the number is used again.
#[derive(Debug)]
pub struct Cloned {
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

#[repr(C)]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Forks this single-threaded process.
pub fn fork() -> io::Result<Side<Pid>> {
    // SAFETY: the process has one thread (module invariant), so no lock can be held by a vanished thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(Pid::from_raw(pid).expect("fork returns a positive pid"))),
    }
}

/// Forks into new namespaces (`CLONE_NEW*` flags) and, on a v2 host, directly into `cgroup`.
pub fn clone_child(namespaces: libc::c_int, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Side<Cloned>> {
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: namespaces as u64 | libc::CLONE_PIDFD as u64,
        pidfd: &raw mut pidfd as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM this is a fork of a single-threaded process; `args` and `pidfd` outlive the call.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(Cloned {
            pid: Pid::from_raw(pid as i32).expect("clone3 returns a positive pid"),
            // SAFETY: the kernel stored a new descriptor there, which nobody else owns.
            pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        })),
    }
}

/// Forks a child of our own parent, to which its end is told as ours would be.
pub fn clone_sibling() -> io::Result<Side<Pid>> {
    let args = CloneArgs { flags: libc::CLONE_PARENT as u64, ..CloneArgs::default() };
    // SAFETY: without CLONE_VM this is a fork of a single-threaded process; `args` outlives the call.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(Pid::from_raw(pid as i32).expect("clone3 returns a positive pid"))),
    }
}

/// Leaves namespaces (`CLONE_NEW*` flags) for fresh ones.
pub fn unshare(namespaces: libc::c_int) -> io::Result<()> {
    // SAFETY: only CLONE_NEW* flags are passed, which change no memory and close no descriptor.
    check(unsafe { libc::unshare(namespaces) })
}

/// Ends the process without running destructors or exit handlers; for the copy that could not exec.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: always sound.
    unsafe { libc::_exit(code) }
}

/// Takes ownership of a descriptor that was inherited across exec; fails when it is not open.
pub fn adopt(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: asks only whether the number is open.
    check(unsafe { libc::fcntl(fd, libc::F_GETFD) })?;
    // SAFETY: it is open, and the caller (process start-up) is the only one who knows of it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes `fd` available as `target` for the program that is executed next.
///
/// `fd` must not itself be below [`FIRST_FREE`]: `dup2` of a number onto itself keeps its close-on-exec flag.
pub fn place(fd: BorrowedFd<'_>, target: RawFd) -> io::Result<()> {
    debug_assert!(fd.as_raw_fd() >= FIRST_FREE);
    // SAFETY: targets 0 to 5 are reserved for this purpose; no owner of them exists in the copy any more.
    check(unsafe { libc::dup2(fd.as_raw_fd(), target) })
}

/// Descriptors below this are placed by number for the agent.
pub const FIRST_FREE: RawFd = 10;

/// A duplicate at or above [`FIRST_FREE`], closed on exec.
pub fn lift(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FREE)?)
}

/// Closes every descriptor from `first` on. Owners of such descriptors must not use or drop them afterwards:
/// call it right before exec, or at start-up before any exist.
pub fn close_from(first: RawFd) -> io::Result<()> {
    // SAFETY: closes only; the caller upholds the ownership rule above.
    check(unsafe { libc::close_range(first as libc::c_uint, libc::c_uint::MAX, 0) })
}

/// Gives every signal its default action and unblocks all, as a fresh program expects.
pub fn reset_signals() {
    // The kernel's own structure, all zero: default action, no flags, empty mask. By raw call, because libc keeps
    // two signals for itself and would leave them as the server's parent had them.
    let default = [0_u64; 4];
    for signal in 1..=64_i32 {
        // SAFETY: `default` is a valid kernel sigaction; the few signals that cannot be changed are refused.
        unsafe {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null_mut::<u64>(),
                8_usize,
            )
        };
    }
    // SAFETY: a zeroed set is a valid argument for sigemptyset, which initialises it.
    unsafe {
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
    }
}

/// Marks every descriptor from `first` on to be closed by exec.
pub fn close_on_exec_from(first: RawFd) -> io::Result<()> {
    // SAFETY: sets a flag only.
    check(unsafe {
        libc::close_range(first as libc::c_uint, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int)
    })
}

/// Lets the kernel reap children (zygote) or keeps them for `wait` (shim).
pub fn reap_children_automatically(automatic: ReapChildren) {
    let action = match automatic {
        ReapChildren::ByKernel => libc::SIG_IGN,
        ReapChildren::ByWait => libc::SIG_DFL,
    };
    // SAFETY: both are valid actions.
    unsafe { libc::signal(libc::SIGCHLD, action) };
}

/// See [`reap_children_automatically`].
#[derive(Clone, Copy, Debug)]
pub enum ReapChildren {
    ByKernel,
    ByWait,
}

/// Replaces the session keyring, so that keys of the server's session are out of reach.
pub fn fresh_session_keyring() -> io::Result<()> {
    const KEYCTL_JOIN_SESSION_KEYRING: libc::c_long = 1;
    // SAFETY: a null name asks for an anonymous keyring.
    let result =
        unsafe { libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, std::ptr::null::<u8>()) };
    check(if result < 0 { -1 } else { 0 })
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
