//! The authority of each sandbox that signs keys of users for its SSH server.
//!
//! Its private key lies beside the other secrets of the sandbox and is read for each signature: it is in no answer, in no log and in no box,
//! which gets the public half in its document.

mod certificate;

use std::{
    fs::{File, OpenOptions},
    io::{self, Read, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
    time::Duration,
};

use sandglass_sandbox::{SandboxId, Timestamp, source::RepositorySource, workspace::Kind};
use tracing::info;

use self::certificate::{PublicKey, Signing, Statement};
use super::Workspaces;

/// How long a certificate is good. A session that it began goes on.
const LASTS: Duration = Duration::from_secs(300);
/// Clocks of clients and boxes may be behind by so much.
const SLACK: Duration = Duration::from_secs(60);

/// A certificate for a user's key.
#[derive(Debug, Clone)]
pub struct UserCertificate {
    /// One line, as a file `…-cert.pub` has it.
    pub certificate: String,
    pub expires_at: Timestamp,
}

/// Why there is no certificate.
#[derive(Debug, thiserror::Error)]
pub enum NotCertified {
    /// What was sent is no key.
    #[error(
        "publicKey must be one public key of a known kind (ed25519, ecdsa, or their security key forms) as OpenSSH writes it; RSA is not accepted"
    )]
    Key,
    #[error("{0}")]
    Internal(String),
}

impl Workspaces {
    /// What the box is to believe; `None` for a sandbox without an SSH server.
    pub(super) fn authority_of(
        &self,
        id: SandboxId,
        source: &RepositorySource,
    ) -> io::Result<Option<String>> {
        let asked = source.services.iter().any(|service| matches!(service.kind, Kind::Ssh(_)));
        asked.then(|| self.authority(id).map(|authority| authority.public_key())).transpose()
    }

    fn authority(&self, id: SandboxId) -> io::Result<Signing> {
        let secret = load_or_create(&self.folders.authority(id)?)?;
        Signing::of(&secret).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Signs a user's key for the SSH server of a sandbox, for every login there.
    ///
    /// # Errors
    /// When it is no key, or the authority cannot be used.
    pub fn certify(&self, id: SandboxId, public_key: &str) -> Result<UserCertificate, NotCertified> {
        let internal = |error: &dyn std::fmt::Display| NotCertified::Internal(error.to_string());
        let key = PublicKey::parse(public_key).ok_or(NotCertified::Key)?;
        let authority = self.authority(id).map_err(|error| internal(&error))?;
        let now = self.clock.now();
        let out_of_range = || internal(&"the clock is out of range");
        let expires_at = now.checked_add(LASTS).ok_or_else(out_of_range)?;
        let seconds = |time: Timestamp| u64::try_from(time.as_millis() / 1000).unwrap_or(0);
        let (principal, key_id) = (id.to_string(), format!("sandbox {id}"));
        let nonce = uuid::Uuid::new_v4();
        let said = Statement {
            nonce: nonce.as_bytes(),
            serial: uuid::Uuid::new_v4().as_u64_pair().1,
            key_id: &key_id,
            principal: &principal,
            valid_after: seconds(now).saturating_sub(SLACK.as_secs()),
            valid_before: seconds(expires_at),
        };
        let certificate =
            authority.certify(&key, &said).ok_or_else(|| internal(&"the key could not be signed"))?;
        info!(sandbox = %id, key = key.fingerprint(), serial = said.serial, "a key was certified for SSH");
        Ok(UserCertificate { certificate, expires_at })
    }
}

/// The secret in a file, or a new one that is there afterwards, whole and with mode 600.
fn load_or_create(path: &Path) -> io::Result<[u8; 32]> {
    match std::fs::read(path) {
        Ok(bytes) => return bytes.try_into().map_err(|_| io::ErrorKind::InvalidData.into()),
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Err(_) => {}
    }
    let mut secret = [0; 32];
    File::open("/dev/urandom")?.read_exact(&mut secret)?;
    let unfinished = path.with_extension(format!("{}.new", uuid::Uuid::new_v4().simple()));
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&unfinished)?;
    let written = file.write_all(&secret).and_then(|()| file.sync_all());
    // Whoever was first has made the one that counts.
    let placed = written.and_then(|()| std::fs::hard_link(&unfinished, path));
    std::fs::remove_file(&unfinished)?;
    match placed {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => load_or_create(path),
        placed => placed.map(|()| secret),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_secret_is_made_once_and_is_its_owners() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ssh_user_ca");
        let made = load_or_create(&path).unwrap();
        assert_eq!(load_or_create(&path).unwrap(), made);
        assert_ne!(made, [0; 32]);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, 0o600);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
        std::fs::write(&path, "short").unwrap();
        assert_eq!(load_or_create(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
