//! Where the files of a sandbox's channel lie on this machine.
//!
//! ```text
//!   <state_dir>/bridge/<id>/agent.sock          shown in the box as a folder, so that a socket that is made again is seen
//!   <state_dir>/workspaces/<id>/workspace.json  shown in the box as a file
//!   <state_dir>/workspaces/<id>/workspace.token likewise
//!   <state_dir>/workspaces/<id>/confidential    the server's own
//! ```
//!
//! Everything is of the server's user alone.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write},
    os::{
        fd::AsRawFd,
        unix::fs::{DirBuilderExt, OpenOptionsExt},
    },
    path::{Path, PathBuf},
};

use sandglass_sandbox::{SandboxId, ports::runtime::Delivery, workspace};
use tokio::net::UnixListener;

use super::Confidential;

const SOCKET: &str = "agent.sock";
const DOCUMENT: &str = "workspace.json";
const TOKEN: &str = "workspace.token";
const CONFIDENTIAL: &str = "confidential";

#[derive(Debug)]
pub(super) struct Folders {
    bridge: PathBuf,
    files: PathBuf,
}

impl Folders {
    pub(super) fn new(state_dir: &Path) -> Self {
        Self { bridge: state_dir.join("bridge"), files: state_dir.join("workspaces") }
    }

    fn of(&self, id: SandboxId) -> PathBuf {
        self.files.join(id.to_string())
    }

    fn bridge_of(&self, id: SandboxId) -> PathBuf {
        self.bridge.join(id.to_string())
    }

    /// Every sandbox that has files here.
    pub(super) fn all(&self) -> Vec<SandboxId> {
        let names = [&self.bridge, &self.files].into_iter().filter_map(|folder| fs::read_dir(folder).ok());
        let names = names.flatten().filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        names.collect()
    }

    /// Opens the socket. One that an earlier server left is replaced.
    pub(super) fn listen(&self, id: SandboxId) -> io::Result<UnixListener> {
        let folder = self.bridge_of(id);
        make_private(&folder)?;
        match fs::remove_file(folder.join(SOCKET)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        // By way of its folder's descriptor: the address of a socket is shorter than a path may be.
        let opened = fs::File::open(&folder)?;
        let listener = UnixListener::bind(format!("/proc/self/fd/{}/{SOCKET}", opened.as_raw_fd()))?;
        fs::set_permissions(folder.join(SOCKET), std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
        Ok(listener)
    }

    pub(super) fn confidential(&self, id: SandboxId) -> io::Result<Confidential> {
        match fs::read(self.of(id).join(CONFIDENTIAL)) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(io::Error::other),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Confidential::default()),
            Err(error) => Err(error),
        }
    }

    pub(super) fn keep_confidential(&self, id: SandboxId, secrets: &Confidential) -> io::Result<()> {
        self.write(id, CONFIDENTIAL, &serde_json::to_vec(secrets)?)
    }

    /// The token that the box was or will be handed.
    pub(super) fn token(&self, id: SandboxId) -> Option<String> {
        fs::read_to_string(self.of(id).join(TOKEN)).ok().filter(|token| !token.is_empty())
    }

    pub(super) fn keep_token(&self, id: SandboxId, token: &str) -> io::Result<()> {
        self.write(id, TOKEN, token.as_bytes())
    }

    pub(super) fn keep_document(&self, id: SandboxId, document: &workspace::Workspace) -> io::Result<()> {
        self.write(id, DOCUMENT, &serde_json::to_vec(document)?)
    }

    /// What is shown in the box.
    pub(super) fn delivery(&self, id: SandboxId, socket: bool) -> Vec<Delivery> {
        let files = self.of(id);
        let show =
            |source: PathBuf, target: &str| Delivery { source, target: target.into(), read_only: true };
        let mut shown =
            vec![show(files.join(DOCUMENT), workspace::FILE), show(files.join(TOKEN), workspace::TOKEN_FILE)];
        if socket {
            let target = Path::new(workspace::BRIDGE_SOCKET).parent().and_then(Path::to_str);
            shown.extend(target.map(|target| show(self.bridge_of(id), target)));
        }
        shown
    }

    /// Whether there is anything of the sandbox.
    pub(super) fn has(&self, id: SandboxId) -> bool {
        self.of(id).exists() || self.bridge_of(id).exists()
    }

    pub(super) fn remove(&self, id: SandboxId) -> io::Result<()> {
        for folder in [self.bridge_of(id), self.of(id)] {
            match fs::remove_dir_all(&folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// In place, because a box may be shown the file itself; aside first, so that nobody reads half of a new one.
    fn write(&self, id: SandboxId, name: &str, content: &[u8]) -> io::Result<()> {
        let folder = self.of(id);
        make_private(&folder)?;
        let (path, aside) = (folder.join(name), folder.join(format!("{name}.new")));
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&aside)?;
        file.write_all(content)?;
        fs::rename(aside, path)
    }
}

fn make_private(folder: &Path) -> io::Result<()> {
    fs::DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[tokio::test]
    async fn everything_is_private_and_goes_together() {
        let dir = tempfile::tempdir().unwrap();
        // Longer than the address of a socket may be.
        let deep = dir.path().join("x".repeat(120));
        let folders = Folders::new(&deep);
        let id = SandboxId::random();
        assert!(!folders.has(id) && folders.all().is_empty());
        let secrets = Confidential { repository: "r".into(), ..Confidential::default() };
        folders.keep_confidential(id, &secrets).unwrap();
        folders.keep_token(id, "t").unwrap();
        let first = folders.listen(id).unwrap();
        let _again = folders.listen(id).unwrap();
        drop(first);
        assert_eq!(folders.confidential(id).unwrap(), secrets);
        assert_eq!(folders.token(id).as_deref(), Some("t"));
        for (path, mode) in [
            (folders.bridge_of(id), 0o700),
            (folders.of(id), 0o700),
            (folders.bridge_of(id).join(SOCKET), 0o600),
            (folders.of(id).join(TOKEN), 0o600),
            (folders.of(id).join(CONFIDENTIAL), 0o600),
        ] {
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
        }
        assert_eq!(folders.delivery(id, true)[2].target, Path::new("/run/.execd/bridge"));
        assert_eq!(folders.all().iter().filter(|known| **known == id).count(), 2);
        folders.remove(id).unwrap();
        folders.remove(id).unwrap();
        assert!(!folders.has(id));
    }
}
