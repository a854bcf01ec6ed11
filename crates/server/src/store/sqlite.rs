//! Opening a SQLite file: a new one, one of ours, or one that an OpenSandbox server has begun.

use std::{path::Path, time::Duration};

use sandglass_sandbox::ports::StoreError;
use sqlx::{
    Connection, SqlSafeStr, SqlitePool,
    migrate::{Migration, MigrationType, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};

use super::database::{Database, failed};

/// Opens or creates the file and brings its tables up to date.
pub(super) async fn open(path: &Path) -> Result<Database, StoreError> {
    // It holds the sandboxes' tokens. The files beside it inherit the mode.
    private_file(path).map_err(|e| StoreError::Unavailable(format!("{}: {e}", path.display())))?;
    // WAL with synchronous=NORMAL: safe against a killed process, no fsync on the create path.
    let options = SqliteConnectOptions::new()
        .filename(path)
        .create_if_missing(true)
        .journal_mode(SqliteJournalMode::Wal)
        .synchronous(SqliteSynchronous::Normal)
        .busy_timeout(Duration::from_secs(5))
        .foreign_keys(true);
    // The writer is kept open for good: it spares the create path the opening, and it is how others see that the file is in use.
    let writer = SqlitePoolOptions::new()
        .max_connections(1)
        .min_connections(1)
        .idle_timeout(None)
        .max_lifetime(None)
        // On a full disk a transaction can neither be finished nor undone; nothing but another connection helps.
        .before_acquire(|connection, _| Box::pin(async move { Ok(!connection.is_in_transaction()) }))
        .connect_with(options.clone())
        .await
        .map_err(failed)?;
    adapt(&writer).await?;
    Migrator::with_migrations(migrations())
        .run(&writer)
        .await
        .map_err(|e| StoreError::Unavailable(format!("cannot prepare the tables: {e}")))?;
    if let Err(error) = reserve(&writer).await {
        tracing::warn!(%error, "no space could be reserved for the time when the disk is full");
    }
    let readers = SqlitePoolOptions::new()
        .max_connections(2)
        .min_connections(0)
        .connect_lazy_with(options.read_only(true).create_if_missing(false));
    Ok(Database::Sqlite { writer, readers })
}

fn migrations() -> Vec<Migration> {
    [
        (1, "spine", include_str!("migrations/sqlite/0001_spine.sql")),
        (2, "snapshots", include_str!("migrations/sqlite/0002_snapshots.sql")),
        (3, "image builds", include_str!("migrations/sqlite/0003_image_builds.sql")),
        (4, "agents", include_str!("migrations/sqlite/0004_agents.sql")),
        (5, "webhooks", include_str!("migrations/sqlite/0005_webhooks.sql")),
        (6, "policies", include_str!("migrations/sqlite/0006_policies.sql")),
        (7, "pools", include_str!("migrations/sqlite/0007_pools.sql")),
    ]
    .map(|(version, name, sql)| {
        Migration::new(version, name.into(), MigrationType::Simple, sql.into_sql_str(), false)
    })
    .into()
}

/// Columns without which a table `snapshots` is not the one that both servers know.
const NEEDED: [&str; 11] = [
    "id",
    "source_sandbox_id",
    "name",
    "description",
    "restore_config",
    "state",
    "reason",
    "message",
    "last_transition_at",
    "created_at",
    "updated_at",
];

/// Brings a table of snapshots that an older OpenSandbox server made into the form of the current one.
async fn adapt(writer: &SqlitePool) -> Result<(), StoreError> {
    let columns: Vec<(String, i64)> =
        sqlx::query_as("SELECT name, \"notnull\" FROM pragma_table_info('snapshots')")
            .fetch_all(writer)
            .await
            .map_err(failed)?;
    if columns.is_empty() {
        return Ok(());
    }
    if let Some(absent) = NEEDED.iter().find(|needed| columns.iter().all(|(name, _)| name != *needed)) {
        return Err(StoreError::Corrupt(format!(
            "the table `snapshots` has no column `{absent}`; it belongs to another program"
        )));
    }
    match columns.iter().find(|(name, _)| name == "namespace") {
        None => {
            let add = "ALTER TABLE snapshots ADD COLUMN namespace TEXT DEFAULT NULL";
            sqlx::query(add).execute(writer).await.map_err(failed)?;
        }
        Some((_, 0)) => {}
        // A column cannot be made nullable in place, and rows without a tenant have no namespace.
        Some(_) => loosen(writer).await?,
    }
    Ok(())
}

async fn loosen(writer: &SqlitePool) -> Result<(), StoreError> {
    let mut tx = writer.begin().await.map_err(failed)?;
    for statement in [
        "ALTER TABLE snapshots ADD COLUMN loose TEXT DEFAULT NULL",
        "UPDATE snapshots SET loose = NULLIF(namespace, '')",
        "DROP INDEX IF EXISTS idx_snapshots_name_namespace",
        "ALTER TABLE snapshots DROP COLUMN namespace",
        "ALTER TABLE snapshots RENAME COLUMN loose TO namespace",
    ] {
        sqlx::query(statement).execute(&mut *tx).await.map_err(failed)?;
    }
    tx.commit().await.map_err(failed)
}

/// Leaves free pages in the database and a log of some length beside it, so that removals can be recorded on a full disk:
/// it is they that make room again.
async fn reserve(writer: &SqlitePool) -> Result<(), sqlx::Error> {
    for statement in [
        "CREATE TABLE reserve (filler BLOB)",
        "INSERT INTO reserve VALUES (zeroblob(2097152))",
        "DROP TABLE reserve",
        "PRAGMA wal_checkpoint(PASSIVE)",
        // The filler went through the page cache.
        "PRAGMA shrink_memory",
    ] {
        sqlx::query(statement).execute(writer).await?;
    }
    Ok(())
}

fn private_file(path: &Path) -> std::io::Result<()> {
    use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        std::fs::create_dir_all(parent)?;
    }
    let file = std::fs::OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_permissions(std::fs::Permissions::from_mode(0o600))
}
