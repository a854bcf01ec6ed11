//! The server's side of creating boxes: start a zygote, hand it directories.
//!
//! A zygote is a small single-threaded process that forks one shim per create, which saves the exec and is safe
//! where a fork of the threaded server would not be. It ends when this handle is dropped or the server dies; the
//! shims do not.
//! Invariant: the zygote gets nothing of the server's but one socket, so that nothing keeps a pipe of it open.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sendmsg,
    socketpair,
};

/// A running zygote. All methods may be called from several threads at once.
#[derive(Debug)]
pub struct Zygote {
    /// Taken when dropped, which ends the zygote.
    control: Option<OwnedFd>,
    process: std::sync::Mutex<Child>,
}

impl Zygote {
    /// Starts `shim_binary` as a zygote.
    pub fn spawn(shim_binary: &Path) -> io::Result<Self> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let process = detached(shim_binary, &["zygote".as_ref()], theirs)?;
        Ok(Self { control: Some(ours), process: std::sync::Mutex::new(process) })
    }

    /// Starts a shim for `dir`, in which `spec.json` and `facts.json` lie, and returns its report channel.
    ///
    /// Returns at once; [`crate::client::read_report`] waits for the outcome. The end of the channel without a
    /// report means that the shim died. A broken pipe means that the zygote is gone: use [`run`] or spawn again.
    pub fn create(&self, dir: &Path) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        let handles = [theirs.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !ancillary.push(SendAncillaryMessage::ScmRights(&handles)) {
            return Err(io::Error::other("no space for one descriptor"));
        }
        let dir = std::path::absolute(dir)?;
        let path = [IoSlice::new(dir.as_os_str().as_bytes())];
        let control = self.control.as_ref().ok_or(io::ErrorKind::BrokenPipe)?;
        sendmsg(control, &path, &mut ancillary, SendFlags::NOSIGNAL)?;
        Ok(ours)
    }

    /// Whether the process still runs.
    pub fn is_alive(&self) -> bool {
        let mut process = self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        matches!(process.try_wait(), Ok(None))
    }

    /// Process id, for diagnostics.
    pub fn pid(&self) -> u32 {
        self.process.lock().unwrap_or_else(std::sync::PoisonError::into_inner).id()
    }
}

impl Drop for Zygote {
    fn drop(&mut self) {
        drop(self.control.take());
        // It ends at once, so that this waits for no more than a process switch or two.
        let process = self.process.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let _ = process.wait();
    }
}

/// Starts a shim for `dir` without a zygote; slower by the exec, otherwise the same.
///
/// The shim is this process's child, which must reap it: keep the [`Child`] and wait for it.
pub fn run(shim_binary: &Path, dir: &Path) -> io::Result<(UnixStream, Child)> {
    let (ours, theirs) = UnixStream::pair()?;
    let dir = std::path::absolute(dir)?;
    let child = detached(shim_binary, &["run".as_ref(), dir.as_os_str()], theirs.into())?;
    Ok((ours, child))
}

/// The socket travels as standard input: moving it to a fixed low descriptor between fork and exec could
/// overwrite the pipe over which the standard library reports a failed exec.
fn detached(binary: &Path, arguments: &[&std::ffi::OsStr], socket: OwnedFd) -> io::Result<Child> {
    Command::new(binary)
        .args(arguments)
        .env_clear()
        .current_dir("/")
        .stdin(socket)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
}
