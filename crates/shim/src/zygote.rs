//! The zygote's loop and the start-up that it shares with a directly executed shim.
//!
//! Invariant: one thread, and nothing that a fork must not copy: no pending output, no locks, no children to wait for.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, fstat};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::host::Host;
use crate::kernel::process::{
    FIRST_FREE, ReapChildren, Side, adopt, close_from, fork, lift, place, reap_children_automatically,
};
use crate::supervise;

/// Descriptor that a caller without our library may use for the socket.
const SOCKET_FD: i32 = 3;

const LONGEST_PATH: usize = 4096;

/// Forks a shim for every directory that arrives, until the server is gone. Returns the exit code.
pub fn zygote() -> i32 {
    let Ok(control) = inherited_socket() else { return 64 };
    let _ = rustix::thread::set_name(c"sandglass-zygot");
    reap_children_automatically(ReapChildren::ByKernel);
    let host = Host::detect();
    loop {
        match receive(&control) {
            Ok(Some((dir, report))) => match fork() {
                Ok(Side::Child) => {
                    drop(control);
                    return shim(host.as_ref().map_err(ToString::to_string), &dir, report);
                }
                // The report channel closes, which tells the server.
                Ok(Side::Parent(_)) | Err(_) => {}
            },
            Ok(None) => return 0,
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return 1,
        }
    }
}

/// A shim without a zygote.
pub fn run(dir: &Path) -> i32 {
    let Ok(report) = inherited_socket() else { return 64 };
    let host = Host::detect();
    shim(host.as_ref().map_err(ToString::to_string), dir, report.into())
}

fn shim(host: Result<&Host, String>, dir: &Path, report: UnixStream) -> i32 {
    reap_children_automatically(ReapChildren::ByWait);
    // Fails only for a group leader, which then has a session of its own already.
    let _ = rustix::process::setsid();
    supervise::run(host, dir, report)
}

/// The one socket that was handed over, as standard input or descriptor 3; everything else is closed, so that no
/// pipe of the server's callers is kept open by us.
fn inherited_socket() -> std::io::Result<OwnedFd> {
    let is_socket =
        |fd: &OwnedFd| fstat(fd).is_ok_and(|stat| FileType::from_raw_mode(stat.st_mode) == FileType::Socket);
    let input = adopt(0)?;
    let socket = if is_socket(&input) { lift(input.as_fd())? } else { lift(adopt(SOCKET_FD)?.as_fd())? };
    if !is_socket(&socket) {
        return Err(std::io::ErrorKind::InvalidInput.into());
    }
    let null = lift(std::fs::File::options().read(true).write(true).open("/dev/null")?.as_fd())?;
    // Kept open as they are: the next lines give 0 to 2 a new meaning.
    std::mem::forget(input);
    for target in 0..3 {
        place(null.as_fd(), target)?;
    }
    drop(null);
    for fd in (3..FIRST_FREE).filter_map(|fd| adopt(fd).ok()) {
        drop(fd);
    }
    use std::os::fd::AsRawFd;
    close_from(socket.as_raw_fd() + 1)?;
    for fd in (FIRST_FREE..socket.as_raw_fd()).filter_map(|fd| adopt(fd).ok()) {
        drop(fd);
    }
    Ok(socket)
}

/// One directory with its report channel; `None` at the end.
fn receive(control: &OwnedFd) -> Result<Option<(PathBuf, UnixStream)>, rustix::io::Errno> {
    let mut path = [0; LONGEST_PATH];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let mut parts = [IoSliceMut::new(&mut path)];
    let received = recvmsg(control, &mut parts, &mut ancillary, RecvFlags::CMSG_CLOEXEC)?;
    let channel = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    match channel {
        Some(channel) if received.bytes > 0 => {
            let dir = Path::new(std::ffi::OsStr::from_bytes(&path[..received.bytes])).to_owned();
            Ok(Some((dir, channel.into())))
        }
        _ => Ok(None),
    }
}
