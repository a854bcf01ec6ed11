//! `[store]`: the server's own database.

use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{FilePath, Int, Maybe, SecretText, Span, Words};
use super::reader::Section;
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

impl StoreConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("type", Words::new(), &mut self.kind, "Where snapshots, templates and events are kept.");
        section.key(
            "path",
            FilePath::any(),
            &mut self.path,
            "SQLite file; parents are created. With the embedded runtime the default is `server.db` in \
             `embedded.state_dir`.",
        );
        section.table("postgresql", "The PostgreSQL store.", &mut self.postgresql, PostgresConfig::keys);
    }
}

impl PostgresConfig {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "dsn",
            Maybe(SecretText::any()),
            &mut self.dsn,
            "Connection string. Required when `store.type` is `postgresql`.",
        );
        section.key("min_pool_size", Int::at_least(0), &mut self.min_pool_size, "Connections kept open.");
        section.key("max_pool_size", Int::at_least(1), &mut self.max_pool_size, "Most connections.");
        section.key(
            "connect_timeout_seconds",
            Span::seconds(1),
            &mut self.connect_timeout,
            "How long connecting may take.",
        );
        section.key(
            "pool_timeout_seconds",
            Span::positive_seconds(),
            &mut self.pool_timeout,
            "How long a query waits for a free connection.",
        );
        section.key(
            "snapshot_recovery_interval_seconds",
            Span::positive_seconds(),
            &mut self.snapshot_recovery_interval,
            "How often snapshots of a lost peer are looked for (Kubernetes only).",
        );
    }
}
