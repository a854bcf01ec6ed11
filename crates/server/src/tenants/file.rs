//! Tenants from a file that is looked at every two seconds.
//!
//! A change that cannot be read leaves the last good state in force; only taking the file away locks everybody out.

use std::{
    fmt,
    fs::Metadata,
    io::{self, ErrorKind},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use async_trait::async_trait;
use tokio::time::MissedTickBehavior;
use tokio_util::task::AbortOnDropHandle;
use tracing::{error, info};

use super::{
    keyring::{ProviderUnavailable, TenantProvider},
    open::OpenError,
    principal::Tenant,
    table::Table,
};

/// How often the file is looked at.
const EVERY: Duration = Duration::from_secs(2);

/// The provider `file`.
pub struct FileProvider {
    current: Arc<RwLock<Arc<Table>>>,
    _watching: AbortOnDropHandle<()>,
}

impl fmt::Debug for FileProvider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FileProvider")
    }
}

impl FileProvider {
    /// Reads the file and begins to watch it.
    ///
    /// # Errors
    /// When it cannot be read now.
    pub async fn open(path: &Path) -> Result<Self, OpenError> {
        let (watch, current) = Watch::open(path).await?;
        let watching = tokio::spawn(watch.run());
        Ok(Self { current, _watching: AbortOnDropHandle::new(watching) })
    }
}

#[async_trait]
impl TenantProvider for FileProvider {
    async fn tenant(&self, key: &[u8]) -> Result<Option<Arc<Tenant>>, ProviderUnavailable> {
        let table = Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner));
        Ok(table.owner(key))
    }
}

/// What was found at the path. The same thing twice is no news.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Found {
    /// By modification time, length and identity: a file moved over the old one may be older.
    File {
        modified: (i64, i64),
        len: u64,
        inode: (u64, u64),
    },
    Absent,
    Unreadable(ErrorKind),
}

impl Found {
    fn of(metadata: io::Result<Metadata>) -> Self {
        match metadata {
            Ok(file) => Self::File {
                modified: (file.mtime(), file.mtime_nsec()),
                len: file.len(),
                inode: (file.dev(), file.ino()),
            },
            Err(error) if error.kind() == ErrorKind::NotFound => Self::Absent,
            Err(error) => Self::Unreadable(error.kind()),
        }
    }
}

struct Watch {
    path: PathBuf,
    current: Arc<RwLock<Arc<Table>>>,
    last: Found,
}

impl Watch {
    async fn open(path: &Path) -> Result<(Self, Arc<RwLock<Arc<Table>>>), OpenError> {
        // Looked at before it is read: a change in between is found by the next look.
        let last = Found::of(tokio::fs::metadata(path).await);
        let text = tokio::fs::read_to_string(path)
            .await
            .map_err(|source| OpenError::Read { path: path.to_owned(), source })?;
        let table =
            Table::parse(&text).map_err(|source| OpenError::Invalid { path: path.to_owned(), source })?;
        info!(file = %path.display(), keys = table.len(), "tenants read");
        let current = Arc::new(RwLock::new(Arc::new(table)));
        Ok((Self { path: path.to_owned(), current: Arc::clone(&current), last }, current))
    }

    async fn run(mut self) {
        let mut ticks = tokio::time::interval(EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.look().await;
        }
    }

    async fn look(&mut self) {
        let found = Found::of(tokio::fs::metadata(&self.path).await);
        if found == self.last {
            return;
        }
        let file = self.path.display();
        self.last = found.clone();
        match found {
            Found::Absent => {
                self.put(Table::default());
                error!(%file, "the tenants file is gone: no key is valid until it is back");
            }
            Found::Unreadable(kind) => {
                error!(%file, error = %kind, "the tenants file cannot be read; the last tenants stay");
            }
            Found::File { .. } => match tokio::fs::read_to_string(&self.path).await {
                Ok(text) => match Table::parse(&text) {
                    Ok(table) => {
                        info!(%file, keys = table.len(), "tenants read again");
                        self.put(table);
                    }
                    Err(error) => {
                        error!(%file, %error, "the tenants file is not valid; the last tenants stay")
                    }
                },
                Err(error) => {
                    // Not settled by this look: the next one finds something else than this.
                    self.last = Found::Unreadable(error.kind());
                    error!(%file, error = %error.kind(), "the tenants file cannot be read; the last tenants stay");
                }
            },
        }
    }

    fn put(&self, table: Table) {
        *self.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn tenant(name: &str, key: &str) -> String {
        format!("[[tenants]]\nname = \"{name}\"\nnamespace = \"n\"\napi_keys = [\"{key}\"]\n")
    }

    async fn owner(provider: &FileProvider, key: &str) -> Option<String> {
        provider.tenant(key.as_bytes()).await.unwrap().map(|tenant| tenant.name.clone())
    }

    /// Past the next look, which is over when the blocking pool has nothing left to do.
    async fn next_look() {
        tokio::time::sleep(EVERY + EVERY / 2).await;
    }

    #[tokio::test(start_paused = true)]
    async fn changes_are_seen_and_mistakes_change_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.toml");
        fs::write(&path, tenant("a", "one")).unwrap();
        let provider = FileProvider::open(&path).await.unwrap();
        assert_eq!(owner(&provider, "one").await.as_deref(), Some("a"));

        fs::write(&path, tenant("a", "two") + &tenant("b", "three")).unwrap();
        next_look().await;
        assert_eq!(owner(&provider, "one").await, None, "a key that was taken out");
        assert_eq!(owner(&provider, "two").await.as_deref(), Some("a"));
        assert_eq!(owner(&provider, "three").await.as_deref(), Some("b"));

        for bad in ["not toml at all", "", &(tenant("a", "four") + &tenant("b", "four")), "\u{0}\u{1}"] {
            fs::write(&path, bad).unwrap();
            next_look().await;
            assert_eq!(owner(&provider, "two").await.as_deref(), Some("a"), "{bad:?}");
            assert_eq!(owner(&provider, "four").await, None, "{bad:?}");
        }
        fs::write(&path, [0xff, 0xfe]).unwrap();
        next_look().await;
        assert_eq!(owner(&provider, "two").await.as_deref(), Some("a"), "not even text");

        fs::remove_file(&path).unwrap();
        next_look().await;
        assert_eq!(owner(&provider, "two").await, None, "no file, no keys");

        // Replaced the way careful tools do it, with an older file of the same length.
        let other = dir.path().join("new");
        fs::write(&other, tenant("c", "two")).unwrap();
        fs::rename(&other, &path).unwrap();
        next_look().await;
        assert_eq!(owner(&provider, "two").await.as_deref(), Some("c"));
    }

    #[tokio::test]
    async fn a_server_does_not_start_on_a_bad_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tenants.toml");
        assert!(matches!(FileProvider::open(&path).await, Err(OpenError::Read { .. })));
        fs::write(&path, "[[tenants]]\nname = \"hunter2").unwrap();
        let error = FileProvider::open(&path).await.unwrap_err();
        assert!(matches!(error, OpenError::Invalid { .. }));
        assert!(!error.to_string().contains("hunter2"));
    }
}
