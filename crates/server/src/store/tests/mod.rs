//! One body for both engines. PostgreSQL is the server that `SANDGLASS_TEST_POSTGRES` names; every test makes a database
//! of its own there. Without the variable those halves say that they were skipped.

mod adoption;
mod behaviour;
mod image_builds;
mod moving;
mod outage;
mod webhooks;

use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    lifecycle::intent::{Intent, Operation, RemoveReason},
    ports::store::{
        Advance, Claim, EventRecord, HistoryBounds, IdempotencyRecord, SnapshotFilter, Store, StoreError,
    },
    snapshot::{RestoreConfig, SnapshotRecord, SnapshotState},
};
use sqlx::{AssertSqlSafe, Connection, PgConnection};

use super::{SqlStore, database::values};
use crate::config::{PostgresConfig, Secret, StoreConfig, StoreKind};

/// A place for one store, and the store in it.
struct Fixture {
    config: StoreConfig,
    store: SqlStore,
    _dir: tempfile::TempDir,
}

impl Fixture {
    async fn sqlite() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let config = file(dir.path().join("s.db"));
        Self { store: SqlStore::open(&config).await.unwrap(), config, _dir: dir }
    }

    async fn postgres() -> Option<Self> {
        let config = database().await?;
        Some(Self {
            store: SqlStore::open(&config).await.unwrap(),
            config,
            _dir: tempfile::tempdir().unwrap(),
        })
    }

    /// Another server on the same database.
    async fn another(&self) -> SqlStore {
        SqlStore::open(&self.config).await.unwrap()
    }

    async fn end(self) {
        self.store.shut().await;
        if self.config.kind == StoreKind::Postgresql {
            drop_database(&self.config).await;
        }
    }
}

fn file(path: std::path::PathBuf) -> StoreConfig {
    StoreConfig { kind: StoreKind::Sqlite, path, ..StoreConfig::default() }
}

/// The address of the server for tests, unless there is none.
fn server() -> Option<String> {
    let address = std::env::var("SANDGLASS_TEST_POSTGRES").ok().filter(|address| !address.is_empty());
    if address.is_none() {
        eprintln!(
            "SKIPPED: no PostgreSQL; set SANDGLASS_TEST_POSTGRES=postgres://… or run `cargo xtask test`"
        );
    }
    address
}

fn with(address: &str, parameter: &str) -> String {
    format!("{address}{}{parameter}", if address.contains('?') { '&' } else { '?' })
}

/// A fresh, empty database.
async fn database() -> Option<StoreConfig> {
    let address = server()?;
    let name = format!("sandglass_{}", SandboxId::random().to_string().replace('-', ""));
    let mut admin = PgConnection::connect(&address).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("CREATE DATABASE {name} ENCODING 'UTF8' TEMPLATE template0")))
        .execute(&mut admin)
        .await
        .unwrap();
    admin.close().await.unwrap();
    Some(postgres(with(&address, &format!("dbname={name}"))))
}

fn postgres(dsn: String) -> StoreConfig {
    let postgresql = PostgresConfig { dsn: Some(Secret::new(dsn)), ..PostgresConfig::default() };
    StoreConfig { kind: StoreKind::Postgresql, postgresql, ..StoreConfig::default() }
}

fn dsn(config: &StoreConfig) -> &str {
    config.postgresql.dsn.as_ref().unwrap().expose()
}

async fn drop_database(config: &StoreConfig) {
    let name = dsn(config).rsplit("dbname=").next().unwrap().to_owned();
    let mut admin = PgConnection::connect(&server().unwrap()).await.unwrap();
    sqlx::raw_sql(AssertSqlSafe(format!("DROP DATABASE {name} WITH (FORCE)")))
        .execute(&mut admin)
        .await
        .unwrap();
    admin.close().await.unwrap();
}

/// The same test on either engine.
macro_rules! on_both {
    ($(async fn $name:ident($fixture:ident) $body:block)*) => {$(
        mod $name {
            use super::*;

            async fn check($fixture: &Fixture) $body

            #[tokio::test]
            async fn sqlite() {
                let fixture = Fixture::sqlite().await;
                check(&fixture).await;
                fixture.end().await;
            }

            #[tokio::test]
            async fn postgres() {
                let Some(fixture) = Fixture::postgres().await else { return };
                check(&fixture).await;
                fixture.end().await;
            }
        }
    )*};
}
use on_both;

fn at(ms: i64) -> Timestamp {
    Timestamp::clamped(ms)
}

fn intent(id: SandboxId, generation: u64, operation: Operation) -> Intent {
    Intent { sandbox_id: id, generation, operation, accepted_at: at(5), deadline: at(50) }
}

fn event(kind: &str) -> EventRecord {
    EventRecord { at: at(5), kind: kind.into(), message: String::new() }
}

fn snapshot(created: i64) -> SnapshotRecord {
    SnapshotRecord {
        id: SnapshotId::random(),
        source: SandboxId::random(),
        namespace: None,
        name: None,
        description: None,
        restore: None,
        state: SnapshotState::Creating,
        reason: "snapshot_accepted".into(),
        message: Some("Snapshot creation accepted.".into()),
        last_transition_at: at(created),
        created_at: at(created),
    }
}
