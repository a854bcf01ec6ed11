//! `[store]`: the server's own database.

use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::values::Secret;

choice! {
    StoreKind { Sqlite = "sqlite", Postgresql = "postgresql" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct StoreConfig {
    pub kind: StoreKind,
    pub path: PathBuf,
    pub postgresql: PostgresConfig,
}

impl Default for StoreConfig {
    fn default() -> Self {
        Self {
            kind: StoreKind::Sqlite,
            path: PathBuf::from("~/.opensandbox/opensandbox.db"),
            postgresql: PostgresConfig::default(),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct PostgresConfig {
    /// Always set when `store.type` is `postgresql`.
    pub dsn: Option<Secret>,
    pub min_pool_size: u32,
    pub max_pool_size: u32,
    pub connect_timeout: Duration,
    pub pool_timeout: Duration,
    pub snapshot_recovery_interval: Duration,
}

impl Default for PostgresConfig {
    fn default() -> Self {
        Self {
            dsn: None,
            min_pool_size: 1,
            max_pool_size: 10,
            connect_timeout: Duration::from_secs(5),
            pool_timeout: Duration::from_secs(5),
            snapshot_recovery_interval: Duration::from_secs(15),
        }
    }
}
