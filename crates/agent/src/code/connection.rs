//! Where a kernel listens: its ports, its key, and the file that tells it both.
//!
//! Invariant: the file is only its kernel's user's to read, and goes with the value.

use std::fs::{File, Permissions};
use std::io::{self, Write as _};
use std::net::{Ipv4Addr, TcpListener};
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::json;

use super::message::Key;
use crate::accounts::Identity;
use crate::envs::Env;

/// Below the range from which systems take ports for outgoing connections: nobody gets one of these by chance between
/// the choice and the kernel's start.
const PORTS: std::ops::Range<u16> = 18_000..32_000;

#[derive(Debug, Clone, Copy)]
pub(super) struct Ports {
    pub shell: u16,
    pub iopub: u16,
    pub control: u16,
    stdin: u16,
    heartbeat: u16,
}

impl Ports {
    /// Ports nobody listens on; kernels that start at the same time get different ones.
    pub(super) fn choose() -> io::Result<Self> {
        let mut tried = PORTS;
        let mut next = || {
            let free = tried.find_map(|_| Some(candidate()).filter(|port| is_free(*port)));
            free.ok_or_else(|| io::Error::new(io::ErrorKind::AddrInUse, "no free port for the kernel"))
        };
        Ok(Ports { shell: next()?, iopub: next()?, control: next()?, stdin: next()?, heartbeat: next()? })
    }
}

fn candidate() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    let width = PORTS.end - PORTS.start;
    if NEXT.load(Ordering::Relaxed) == 0 {
        // Agents that share a network start at different places.
        let random =
            u16::from_le_bytes([uuid::Uuid::new_v4().as_bytes()[0], uuid::Uuid::new_v4().as_bytes()[0]]);
        NEXT.store(random % width + 1, Ordering::Relaxed);
    }
    PORTS.start + NEXT.fetch_add(1, Ordering::Relaxed) % width
}

fn is_free(port: u16) -> bool {
    TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
}

/// The file a kernel is started with.
pub(super) struct ConnectionFile(PathBuf);

impl ConnectionFile {
    pub(super) fn write(env: &Env, identity: &Identity, ports: Ports, key: &Key) -> io::Result<Self> {
        let text = json!({
            "transport": "tcp",
            "ip": "127.0.0.1",
            "shell_port": ports.shell,
            "iopub_port": ports.iopub,
            "control_port": ports.control,
            "stdin_port": ports.stdin,
            "hb_port": ports.heartbeat,
            "key": key.text(),
            "signature_scheme": "hmac-sha256",
            "kernel_name": "",
        });
        let given = ["JUPYTER_RUNTIME_DIR", "TMPDIR"].into_iter().filter_map(|name| env.get(name));
        let mut last = io::Error::from(io::ErrorKind::NotFound);
        for folder in given.map(String::as_str).chain(["/tmp", "/dev/shm", "/run"]) {
            match create(Path::new(folder), identity, text.to_string().as_bytes()) {
                Ok(path) => return Ok(ConnectionFile(path)),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ConnectionFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn create(folder: &Path, identity: &Identity, text: &[u8]) -> io::Result<PathBuf> {
    if !folder.is_absolute() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = folder.join(format!("kernel-{}.json", uuid::Uuid::new_v4()));
    let made = File::create_new(&path).and_then(|mut file| {
        file.set_permissions(Permissions::from_mode(0o600))?;
        file.write_all(text)?;
        // Only root may give it away, and only root runs kernels as somebody else.
        let _ = chown(&path, Some(identity.uid), Some(identity.gid));
        Ok(())
    });
    match made {
        Ok(()) => Ok(path),
        Err(error) => {
            let _ = std::fs::remove_file(&path);
            Err(error)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_private_and_goes_with_its_owner() {
        let folder = tempfile::tempdir().unwrap();
        let env = Env::from([("TMPDIR".into(), folder.path().display().to_string())]);
        let identity = Identity { uid: rustix::process::geteuid().as_raw(), ..Identity::default() };
        let (ports, key) = (Ports::choose().unwrap(), Key::new());
        let file = ConnectionFile::write(&env, &identity, ports, &key).unwrap();
        let path = file.path().to_owned();
        assert!(path.starts_with(folder.path()));
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        let text: serde_json::Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            (text["shell_port"].as_u64(), text["key"].as_str()),
            (Some(ports.shell.into()), Some(key.text()))
        );
        drop(file);
        assert!(!path.exists());
    }

    #[test]
    fn no_two_kernels_get_one_port() {
        let mut all: Vec<u16> = Vec::new();
        for _ in 0..20 {
            let Ports { shell, iopub, control, stdin, heartbeat } = Ports::choose().unwrap();
            all.extend([shell, iopub, control, stdin, heartbeat]);
        }
        assert!(all.iter().all(|port| PORTS.contains(port)));
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 100);
    }
}
