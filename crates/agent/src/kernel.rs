//! System calls that rustix lacks or marks unsafe, each behind a safe function: namespaces, forks, mount attributes.
//!
//! Invariant: [`fork`] is called by single-threaded processes only, so the copy may run ordinary Rust code.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Which side of a fork this is.
#[derive(Debug)]
pub enum Side {
    Child,
    Parent(i32),
}

/// Leaves namespaces (`CLONE_NEW*` flags) for fresh ones.
pub fn unshare(namespaces: libc::c_int) -> io::Result<()> {
    // SAFETY: only CLONE_NEW* flags are passed, which change no memory and close no descriptor.
    check(unsafe { libc::unshare(namespaces) })
}

/// Forks this single-threaded process.
pub fn fork() -> io::Result<Side> {
    // SAFETY: the process has one thread (module invariant), so no lock can be held by a vanished thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(Side::Child),
        pid => Ok(Side::Parent(pid)),
    }
}

/// Makes a mount and everything mounted below it read-only.
pub fn set_read_only(mount: BorrowedFd<'_>) -> io::Result<()> {
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    // SAFETY: the path is a constant and the structure lives through the call, with its own size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH | libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<libc::mount_attr>(),
        )
    };
    check(if result < 0 { -1 } else { 0 })
}

/// Brings up the loopback interface of this network namespace.
pub fn open_loopback(socket: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: all zero is a valid value of this C structure.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(*b"lo") {
        *to = libc::c_char::try_from(from).unwrap_or(0);
    }
    request.ifr_ifru.ifru_flags = libc::c_short::try_from(libc::IFF_UP | libc::IFF_RUNNING).unwrap_or(0);
    // SAFETY: the structure lives through the call and has the type that this request reads.
    check(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })
}

/// Sends a signal to one process.
pub fn signal(pid: i32, number: i32) -> bool {
    // SAFETY: plain system call; callers pass pids of processes, never 0 or -1.
    pid > 0 && unsafe { libc::kill(pid, number) == 0 }
}

/// Kills every process that this one may signal, except itself and PID 1 of its namespace. Whoever calls has made sure that it is in a box.
pub fn kill_all_others() {
    // SAFETY: plain system call.
    unsafe { libc::kill(-1, libc::SIGKILL) };
}

/// Ends the process without running destructors or exit handlers.
pub fn exit_now(code: i32) -> ! {
    // SAFETY: always sound.
    unsafe { libc::_exit(code) }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
