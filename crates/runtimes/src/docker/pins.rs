//! Holding on to a directory or file of the host between the check of its path and the moment the engine mounts it.
//!
//! An engine takes paths and follows their links when the container starts, much later than anybody can check them, and a sandbox that
//! may write above such a path can put a link there meanwhile. So the path is opened without following any link, and what was opened is
//! bound to a place of the server's own; the engine is given that place. The approach is that of the Kubernetes kubelet for sub-paths
//! (CVE-2017-1002101). Invariant: what a pin shows is the file that was opened, whatever happens to its name.

use std::{
    fs, io,
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::{
    fs::FileType,
    mount::{MountFlags, UnmountFlags},
};

use super::client::EngineAddress;
use crate::host_paths;

/// Where pins of one server are made.
#[derive(Debug)]
pub(super) struct Pins {
    dir: PathBuf,
    next: AtomicU64,
}

/// A place that shows what was opened, until it is dropped.
#[derive(Debug)]
pub(super) struct Pin(PathBuf);

impl Pins {
    /// Removes what a killed server left pinned: its containers have started, or will be made again.
    pub(super) fn new(dir: PathBuf) -> Self {
        for left in fs::read_dir(&dir).into_iter().flatten().flatten() {
            drop(Pin(left.path()));
        }
        Self { dir, next: AtomicU64::new(0) }
    }

    /// Whether the engine sees what is mounted here: it is on this machine, and in the same mount namespace.
    pub(super) fn are_seen_by(&self, engine: &EngineAddress) -> bool {
        let EngineAddress::Unix(socket) = engine else { return false };
        let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt")).ok();
        let peer = UnixStream::connect(socket)
            .and_then(|stream| rustix::net::sockopt::socket_peercred(&stream).map_err(Into::into));
        let theirs = peer.ok().and_then(|peer| namespace(&peer.pid.as_raw_nonzero().to_string()));
        theirs.is_some() && theirs == namespace("self")
    }

    /// Pins `path`, which must be resolved and absolute. Directories that are missing are made.
    ///
    /// # Errors
    /// `ELOOP` or `ENOTDIR` when a link has come into the path; `EPERM` when this process may not mount.
    pub(super) fn pin(&self, path: &Path) -> io::Result<Pin> {
        let file = host_paths::open(path)?;
        let directory = FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode).is_dir();
        host_paths::private_dir(&self.dir)?;
        let name = format!("{}-{}", std::process::id(), self.next.fetch_add(1, Ordering::Relaxed));
        let pin = Pin(self.dir.join(name));
        if directory {
            fs::create_dir(&pin.0)?;
        } else {
            fs::File::create_new(&pin.0)?;
        }
        let source = format!("/proc/self/fd/{}", file.as_raw_fd());
        rustix::mount::mount(
            source,
            &pin.0,
            c"",
            MountFlags::BIND | MountFlags::REC,
            None::<&std::ffi::CStr>,
        )?;
        Ok(pin)
    }
}

impl Pin {
    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        // A container that has started holds a mount of its own. What is not mounted says so, which is fine.
        let _ = rustix::mount::unmount(&self.0, UnmountFlags::DETACH);
        // Neither removes anything that is not empty: should the mount still be there, its content is safe.
        if fs::remove_dir(&self.0).is_err() && fs::metadata(&self.0).is_ok_and(|m| m.len() == 0) {
            let _ = fs::remove_file(&self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn what_is_pinned_stays_what_it_was_when_its_name_becomes_a_link() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let (secret, shared) = (root.join("secret"), root.join("shared"));
        fs::create_dir_all(shared.join("d")).unwrap();
        fs::create_dir(&secret).unwrap();
        fs::write(secret.join("key"), "k").unwrap();
        fs::write(shared.join("d/mine"), "m").unwrap();
        let pins = Pins::new(root.join("pins"));
        let Ok(pin) = pins.pin(&shared.join("d")) else {
            println!("SKIPPED: pins need the right to mount");
            return;
        };
        fs::rename(shared.join("d"), shared.join("moved")).unwrap();
        symlink(&secret, shared.join("d")).unwrap();
        assert!(pin.path().join("mine").exists() && !pin.path().join("key").exists());
        assert!(pins.pin(&shared.join("d")).is_err(), "a link is not followed");
        assert!(pins.pin(&shared.join("d/new")).is_err() && !secret.join("new").exists());
        let made = pins.pin(&shared.join("new/deep")).unwrap();
        assert!(shared.join("new/deep").is_dir());
        let file = pins.pin(&shared.join("moved/mine")).unwrap();
        assert_eq!(fs::read_to_string(file.path()).unwrap(), "m");
        drop((pin, made, file));
        assert_eq!(fs::read_dir(root.join("pins")).unwrap().count(), 0);
        assert_eq!(fs::read_to_string(shared.join("moved/mine")).unwrap(), "m");
    }

    #[test]
    fn what_a_killed_server_pinned_is_let_go_and_not_emptied() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        fs::create_dir(root.join("data")).unwrap();
        fs::write(root.join("data/file"), "f").unwrap();
        let Ok(pin) = Pins::new(root.join("pins")).pin(&root.join("data")) else {
            println!("SKIPPED: pins need the right to mount");
            return;
        };
        std::mem::forget(pin);
        Pins::new(root.join("pins"));
        assert_eq!(fs::read_dir(root.join("pins")).unwrap().count(), 0);
        assert!(root.join("data/file").exists());
    }
}
