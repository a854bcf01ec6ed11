//! What builds need in confidence, kept on disk until they ended: one file of mode 0600 a build, so that a restart does not cost their secrets.

use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use sandglass_builds::{ImageBuildId, ports::StoreError, ports::Vault, submission::Confidential};

/// See the module documentation.
#[derive(Debug, Clone)]
pub(super) struct DiskVault(PathBuf);

impl DiskVault {
    /// In the folder, which is made with mode 0700. Files of writes that were cut short are removed. Blocking.
    pub(super) fn open(folder: PathBuf) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder)?;
        for entry in fs::read_dir(&folder)? {
            let path = entry?.path();
            if path.extension().is_some_and(|extension| extension == "new") {
                fs::remove_file(path)?;
            }
        }
        Ok(Self(folder))
    }

    fn file(&self, build: ImageBuildId) -> PathBuf {
        self.0.join(build.to_string())
    }

    /// Forgets what no build needs any more: that of a server that ended between two steps. Blocking.
    pub(super) fn prune(&self, needed: impl Fn(ImageBuildId) -> bool) -> io::Result<()> {
        for entry in fs::read_dir(&self.0)? {
            let entry = entry?;
            let id = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if id.is_some_and(|id| !needed(id)) {
                fs::remove_file(entry.path())?;
            }
        }
        Ok(())
    }
}

/// Complete or not at all.
fn write(path: &Path, text: &[u8]) -> io::Result<()> {
    let fresh = path.with_extension("new");
    let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&fresh)?;
    file.write_all(text)?;
    file.sync_all()?;
    fs::rename(fresh, path)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> io::Result<T> + Send + 'static,
) -> Result<T, StoreError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(io::Error::other);
    done.and_then(|done| done).map_err(|error| StoreError::Unavailable(format!("build secrets: {error}")))
}

#[async_trait]
impl Vault for DiskVault {
    async fn put(&self, build: ImageBuildId, confidential: &Confidential) -> Result<(), StoreError> {
        let text = serde_json::to_vec(confidential)
            .map_err(|_| StoreError::Corrupt("build secrets cannot be written down".into()))?;
        let path = self.file(build);
        blocking(move || write(&path, &text)).await
    }

    async fn get(&self, build: ImageBuildId) -> Result<Option<Confidential>, StoreError> {
        let path = self.file(build);
        let read = move || match fs::read(path) {
            Ok(text) => Ok(Some(text)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        };
        let Some(text) = blocking(read).await? else { return Ok(None) };
        // Not the reader's own message, which would repeat what is there.
        let unreadable = |_| StoreError::Corrupt("build secrets are unreadable".into());
        serde_json::from_slice(&text).map(Some).map_err(unreadable)
    }

    async fn forget(&self, build: ImageBuildId) -> Result<(), StoreError> {
        let path = self.file(build);
        blocking(move || match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use sandglass_builds::submission::Secret;

    use super::*;

    #[tokio::test]
    async fn secrets_are_kept_closed_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let vault = DiskVault::open(dir.path().join("vault")).unwrap();
        let mut confidential = Confidential::default();
        confidential.secrets.insert("TOKEN".into(), Secret::new("hunter2hunter2"));
        let (one, other) = (ImageBuildId::random(), ImageBuildId::random());
        vault.put(one, &confidential).await.unwrap();
        vault.put(other, &confidential).await.unwrap();
        let mode = |path: PathBuf| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(vault.file(one)), 0o600);
        assert_eq!(mode(dir.path().join("vault")), 0o700);
        let again = DiskVault::open(dir.path().join("vault")).unwrap();
        assert_eq!(again.get(one).await.unwrap(), Some(confidential));
        again.prune(|id| id == one).unwrap();
        assert_eq!(again.get(other).await.unwrap(), None);
        again.forget(one).await.unwrap();
        again.forget(one).await.unwrap();
        assert_eq!(again.get(one).await.unwrap(), None);
    }
}
