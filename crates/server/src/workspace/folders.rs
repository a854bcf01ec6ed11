//! Where the files of a sandbox's channel lie on this machine.
//!
//! ```text
//!   <state_dir>/bridge/<id>/agent.sock          shown in the box as a folder, so that a socket that is made again is seen
//!   <state_dir>/workspaces/<id>/workspace.json  shown in the box as a file
//!   <state_dir>/workspaces/<id>/workspace.token likewise
//!   <state_dir>/workspaces/<id>/authorities.pem likewise, and readable for everybody in it
//!   <state_dir>/workspaces/<id>/confidential    the server's own
//!   <state_dir>/workspaces/<id>/build-secrets   likewise, until no image is looked for any more
//!   <state_dir>/workspaces/<id>/ssh_user_ca     likewise: what signs the keys of its users
//!   <state_dir>/workspaces/<id>/output          likewise
//! ```
//!
//! Everything else is of the server's user alone.

use std::{
    collections::BTreeMap,
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

use super::{Confidential, output::Outputs};

const SOCKET: &str = "agent.sock";
const DOCUMENT: &str = "workspace.json";
const TOKEN: &str = "workspace.token";
const AUTHORITIES: &str = "authorities.pem";
const CONFIDENTIAL: &str = "confidential";
const BUILD_SECRETS: &str = "build-secrets";
const AUTHORITY: &str = "ssh_user_ca";

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
        let mut secrets: Confidential = self.read(id, CONFIDENTIAL)?.unwrap_or_default();
        if let Some(of_builds) = self.read(id, BUILD_SECRETS)? {
            secrets.build_secrets = of_builds;
        }
        Ok(secrets)
    }

    /// In two files, because one of them goes before the other.
    pub(super) fn keep_confidential(&self, id: SandboxId, secrets: &Confidential) -> io::Result<()> {
        if !secrets.build_secrets.is_empty() {
            self.write(id, BUILD_SECRETS, &serde_json::to_vec(&secrets.build_secrets)?)?;
        }
        let rest = Confidential { build_secrets: BTreeMap::new(), ..secrets.clone() };
        self.write(id, CONFIDENTIAL, &serde_json::to_vec(&rest)?)
    }

    /// No image is looked for any more. Nothing is written for it, so a full disk does not keep them.
    pub(super) fn forget_build_secrets(&self, id: SandboxId) -> io::Result<()> {
        match fs::remove_file(self.of(id).join(BUILD_SECRETS)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// `None` when there is no such file.
    fn read<T: serde::de::DeserializeOwned>(&self, id: SandboxId, name: &str) -> io::Result<Option<T>> {
        match fs::read(self.of(id).join(name)) {
            // Not the reader's own message, which would repeat what is there.
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|_| io::Error::other(format!("the file `{name}` of the sandbox is unreadable"))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Where the key is that signs keys of users; its folder is there afterwards.
    pub(super) fn authority(&self, id: SandboxId) -> io::Result<PathBuf> {
        let folder = self.of(id);
        make_private(&folder)?;
        Ok(folder.join(AUTHORITY))
    }

    /// The token that the box was or will be handed.
    pub(super) fn token(&self, id: SandboxId) -> Option<String> {
        fs::read_to_string(self.of(id).join(TOKEN)).ok().filter(|token| !token.is_empty())
    }

    pub(super) fn keep_token(&self, id: SandboxId, token: &str) -> io::Result<()> {
        self.write_shown(id, TOKEN, token.as_bytes())
    }

    pub(super) fn keep_document(&self, id: SandboxId, document: &workspace::Workspace) -> io::Result<()> {
        self.write_shown(id, DOCUMENT, &serde_json::to_vec(document)?)
    }

    /// Makes everything that is shown in a box that is started before it is known whose it will be. What is there stays.
    pub(super) fn keep_empty(&self, id: SandboxId) -> io::Result<()> {
        let folder = self.of(id);
        make_private(&folder)?;
        make_private(&self.bridge_of(id))?;
        for name in [DOCUMENT, TOKEN] {
            OpenOptions::new().append(true).create(true).mode(0o600).open(folder.join(name))?;
        }
        Ok(())
    }

    /// The box is nobody's again, or still.
    pub(super) fn forget_confidential(&self, id: SandboxId) -> io::Result<()> {
        match fs::remove_file(self.of(id).join(CONFIDENTIAL)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// How the agent was told that it and the server meet; `None` before its box was made.
    pub(super) fn way(&self, id: SandboxId) -> io::Result<Option<workspace::Way>> {
        match fs::read(self.of(id).join(DOCUMENT)) {
            Ok(bytes) => {
                let document: workspace::Workspace = serde_json::from_slice(&bytes)?;
                Ok(Some(document.bridge.way))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// A copy of the authorities that git believes: what the operator changes is for boxes that are made later.
    pub(super) fn keep_authorities(&self, id: SandboxId, from: &Path) -> io::Result<()> {
        self.write(id, AUTHORITIES, &fs::read(from)?)?;
        let path = self.of(id).join(AUTHORITIES);
        fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o644))
    }

    /// What is shown in the box.
    pub(super) fn delivery(&self, id: SandboxId, socket: bool) -> Vec<Delivery> {
        let files = self.of(id);
        let show =
            |source: PathBuf, target: &str| Delivery { source, target: target.into(), read_only: true };
        let mut shown =
            vec![show(files.join(DOCUMENT), workspace::FILE), show(files.join(TOKEN), workspace::TOKEN_FILE)];
        let authorities = files.join(AUTHORITIES);
        if authorities.exists() {
            shown.push(show(authorities, workspace::AUTHORITIES_FILE));
        }
        if socket {
            let target = Path::new(workspace::BRIDGE_SOCKET).parent().and_then(Path::to_str);
            shown.extend(target.map(|target| show(self.bridge_of(id), target)));
        }
        shown
    }

    /// What its services and hooks wrote.
    pub(super) fn outputs(&self, id: SandboxId) -> Outputs {
        Outputs::of(&self.of(id))
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

    /// In place, because a box that waits is shown the file itself. Its agent reads it when it is told to, which is afterwards; and where nothing
    /// changes nothing is written, so that what an agent reads again is whole.
    fn write_shown(&self, id: SandboxId, name: &str, content: &[u8]) -> io::Result<()> {
        let folder = self.of(id);
        make_private(&folder)?;
        let path = folder.join(name);
        if fs::read(&path).is_ok_and(|now| now == content) {
            return Ok(());
        }
        let mut file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.write_all(content)?;
        file.set_len(content.len() as u64)
    }

    /// Aside first, so that nobody reads half of a new one.
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

    #[test]
    fn what_a_waiting_box_is_shown_is_written_into_the_same_file() {
        use std::io::Read;
        let dir = tempfile::tempdir().unwrap();
        let folders = Folders::new(dir.path());
        let id = SandboxId::random();
        folders.keep_empty(id).unwrap();
        for shown in folders.delivery(id, true) {
            assert!(shown.source.exists(), "{}", shown.source.display());
        }
        assert_eq!(folders.token(id), None);
        // As a box has it: by the file, not by its name.
        let mut seen = fs::File::open(folders.of(id).join(TOKEN)).unwrap();
        folders.keep_token(id, "a longer one").unwrap();
        folders.keep_empty(id).unwrap();
        folders.keep_token(id, "short").unwrap();
        let mut text = String::new();
        seen.read_to_string(&mut text).unwrap();
        assert_eq!((text.as_str(), folders.token(id).as_deref()), ("short", Some("short")));
        folders.keep_confidential(id, &Confidential::default()).unwrap();
        folders.forget_confidential(id).unwrap();
        folders.forget_confidential(id).unwrap();
        assert!(!folders.of(id).join(CONFIDENTIAL).exists());
    }

    #[tokio::test]
    async fn everything_is_private_and_goes_together() {
        let dir = tempfile::tempdir().unwrap();
        // Longer than the address of a socket may be.
        let deep = dir.path().join("x".repeat(120));
        let folders = Folders::new(&deep);
        let id = SandboxId::random();
        assert!(!folders.has(id) && folders.all().is_empty());
        let build_secrets = [("TOKEN".to_owned(), "hunter2".to_owned())].into();
        let secrets = Confidential { repository: "r".into(), build_secrets };
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
            (folders.of(id).join(BUILD_SECRETS), 0o600),
        ] {
            assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, mode, "{}", path.display());
        }
        folders.forget_build_secrets(id).unwrap();
        folders.forget_build_secrets(id).unwrap();
        let rest = Confidential { build_secrets: BTreeMap::new(), ..secrets };
        assert_eq!(folders.confidential(id).unwrap(), rest);
        for entry in fs::read_dir(folders.of(id)).unwrap() {
            assert!(!fs::read_to_string(entry.unwrap().path()).unwrap().contains("hunter2"));
        }
        assert_eq!(folders.delivery(id, true)[2].target, Path::new("/run/.execd/bridge"));
        assert_eq!(folders.all().iter().filter(|known| **known == id).count(), 2);
        folders.remove(id).unwrap();
        folders.remove(id).unwrap();
        assert!(!folders.has(id));
    }
}
