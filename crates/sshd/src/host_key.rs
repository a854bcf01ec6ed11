//! The server's own key: made once, kept in a file, told by its fingerprint.

use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use russh::keys::ssh_key::LineEnding;
use russh::keys::ssh_key::private::{Ed25519Keypair, KeypairData};
use russh::keys::{Algorithm, HashAlg, PrivateKey, PublicKey};

/// Far more than any key file.
const MAX_FILE: u64 = 64 << 10;

#[derive(Debug, Clone)]
pub struct HostKey {
    pub(crate) key: PrivateKey,
}

#[derive(Debug, thiserror::Error)]
pub enum HostKeyError {
    #[error("cannot {what} host key {}: {source}", path.display())]
    File { what: &'static str, path: PathBuf, source: io::Error },
    #[error("host key {} is readable by others (mode {mode:o}); make it 600 or remove it", path.display())]
    Exposed { path: PathBuf, mode: u32 },
    #[error("host key {} is damaged or no unencrypted ed25519 key; remove it to have a new one made", path.display())]
    Invalid { path: PathBuf },
}

impl HostKey {
    /// The key in a file, or a new one that is there afterwards, whole and with mode 600. Its folder has to exist.
    pub fn load_or_create(path: &Path) -> Result<Self, HostKeyError> {
        if let Some(key) = Self::load(path)? {
            return Ok(key);
        }
        let key = Self::generate(path)?;
        key.store(path)?;
        // Whoever was first has made the key that counts.
        Self::load(path)?.ok_or_else(|| HostKeyError::Invalid { path: path.to_owned() })
    }

    /// `SHA256:…`, as clients show it.
    pub fn fingerprint(&self) -> String {
        self.key.public_key().fingerprint(HashAlg::Sha256).to_string()
    }

    /// For `known_hosts` files: `ssh-ed25519 AAAA…`.
    pub fn public_key(&self) -> &PublicKey {
        self.key.public_key()
    }

    fn load(path: &Path) -> Result<Option<Self>, HostKeyError> {
        let failed = |source| HostKeyError::File { what: "read", path: path.to_owned(), source };
        let flags = (rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK).bits();
        let file = OpenOptions::new().read(true).custom_flags(i32::try_from(flags).unwrap_or(0)).open(path);
        let file = match file {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let mode = file.metadata().map_err(failed)?.mode() & 0o7777;
        if mode & 0o077 != 0 {
            return Err(HostKeyError::Exposed { path: path.to_owned(), mode });
        }
        let mut text = String::new();
        file.take(MAX_FILE).read_to_string(&mut text).map_err(failed)?;
        match PrivateKey::from_openssh(&text) {
            Ok(key) if !key.is_encrypted() && key.algorithm() == Algorithm::Ed25519 => {
                Ok(Some(HostKey { key }))
            }
            _ => Err(HostKeyError::Invalid { path: path.to_owned() }),
        }
    }

    fn generate(path: &Path) -> Result<Self, HostKeyError> {
        let failed = |source| HostKeyError::File { what: "make", path: path.to_owned(), source };
        let pair = Ed25519Keypair::random(&mut russh::keys::key::safe_rng());
        PrivateKey::new(KeypairData::from(pair), "")
            .map(|key| HostKey { key })
            .map_err(|e| failed(io::Error::other(e)))
    }

    /// Leaves a key alone that somebody else has stored meanwhile.
    fn store(&self, path: &Path) -> Result<(), HostKeyError> {
        let failed = |source| HostKeyError::File { what: "store", path: path.to_owned(), source };
        let text = self.key.to_openssh(LineEnding::LF).map_err(|error| failed(io::Error::other(error)))?;
        let mut name = path.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.new", std::process::id()));
        let unfinished = path.with_file_name(name);
        let written = (|| {
            // One left by a process of the same number is not taken over: it may be anybody's.
            let _ = std::fs::remove_file(&unfinished);
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            std::fs::hard_link(&unfinished, path)
        })();
        let _ = std::fs::remove_file(&unfinished);
        match written {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(failed(error)),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_host_key_is_made_once_and_only_its_owner_reads_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("host_key");
        let made = HostKey::load_or_create(&path).unwrap();
        let again = HostKey::load_or_create(&path).unwrap();
        assert_eq!(made.fingerprint(), again.fingerprint());
        assert!(made.fingerprint().starts_with("SHA256:"));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_key_file_that_cannot_be_trusted_is_not_used() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("host_key");
        std::fs::write(&path, "nonsense").unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
        assert!(matches!(HostKey::load_or_create(&path), Err(HostKeyError::Invalid { .. })));
        std::fs::remove_file(&path).unwrap();
        HostKey::load_or_create(&path).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o640)).unwrap();
        assert!(matches!(HostKey::load_or_create(&path), Err(HostKeyError::Exposed { mode: 0o640, .. })));
    }
}
