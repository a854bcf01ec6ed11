//! Moving everything a store holds into another one, of either engine.
//!
//! The source is only read. What the target holds already stays; rows of the same id are skipped, so that a move can be
//! repeated. All of it happens in one transaction of the target: it is moved or it is not.

use std::{
    collections::HashSet,
    path::{Path, PathBuf},
    time::Duration,
};

use sandglass_sandbox::ports::StoreError;
use sqlx::sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions};
use sqlx::{ConnectOptions, Connection, postgres::PgPoolOptions};

use super::{
    SqlStore,
    database::{Database, Session, Value, failed, values},
    migrate_events::Numbers,
    migrate_rows, postgres,
};
use crate::config::{PostgresConfig, Secret};

/// The variable that holds a connection string, as for the server.
pub const DSN_VARIABLE: &str = "OPENSANDBOX_STORE_POSTGRESQL_DSN";

/// Why nothing was moved.
#[derive(Debug, thiserror::Error)]
pub enum MigrateError {
    #[error("a store is written sqlite:PATH, postgres://…, or postgres for the database in {DSN_VARIABLE}")]
    Place,
    #[error("{DSN_VARIABLE} is not set")]
    NoDsn,
    #[error("source and target are the same")]
    Same,
    #[error("there is no file {}", .0.display())]
    Absent(PathBuf),
    #[error("the source holds none of the tables of a store")]
    Foreign,
    #[error("a server is using the target; stop it first")]
    InUse,
    #[error("source: {0}")]
    Source(#[source] StoreError),
    #[error("target: {0}")]
    Target(#[source] StoreError),
}

/// Where a store is.
#[derive(Clone, Debug, PartialEq)]
pub enum Place {
    Sqlite(PathBuf),
    Postgres(PostgresConfig),
}

impl Place {
    /// Reads `sqlite:PATH`, a connection string, or `postgres` for the one in the environment.
    ///
    /// # Errors
    /// When it is none of these, or the environment has none.
    pub fn parse(text: &str, dsn: Option<&str>) -> Result<Self, MigrateError> {
        let database = |dsn: &str| {
            Self::Postgres(PostgresConfig { dsn: Some(Secret::new(dsn)), ..PostgresConfig::default() })
        };
        if let Some(path) = text.strip_prefix("sqlite:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err(MigrateError::Place) } else { Ok(Self::Sqlite(path.into())) };
        }
        match text {
            "postgres" | "postgresql" => {
                dsn.filter(|dsn| !dsn.is_empty()).map(database).ok_or(MigrateError::NoDsn)
            }
            dsn if dsn.starts_with("postgres://")
                || dsn.starts_with("postgresql://")
                || dsn.contains('=') =>
            {
                Ok(database(dsn))
            }
            _ => Err(MigrateError::Place),
        }
    }
}

/// What became of one table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Moved {
    pub table: &'static str,
    pub total: u64,
    pub migrated: u64,
    /// The target has them already.
    pub skipped: u64,
}

impl Moved {
    pub(super) fn new(table: &'static str) -> Self {
        Self { table, total: 0, migrated: 0, skipped: 0 }
    }

    pub(super) fn count(&mut self, migrated: bool) {
        self.total += 1;
        if migrated { self.migrated += 1 } else { self.skipped += 1 }
    }
}

/// Moves everything, or counts what would be moved.
///
/// # Errors
/// When either side cannot be opened, the source is no store, or a server uses the target. Then nothing is moved.
pub async fn migrate(from: &Place, to: &Place, dry_run: bool) -> Result<Vec<Moved>, MigrateError> {
    if from == to {
        return Err(MigrateError::Same);
    }
    let mut source = Side::read(from).await.map_err(|e| e.unwrap_or_else(MigrateError::Source))?;
    if source.tables.is_empty() {
        return Err(MigrateError::Foreign);
    }
    let target = if dry_run { Side::inspect(to).await } else { Side::write(to).await };
    let mut target = target?;
    let numbers = Numbers::of(&mut source.end(), &mut target.end()).await?;
    let intents = Table::Intents.copy(&mut source, &mut target, dry_run).await?;
    let events = numbers.copy(&mut source.end(), &mut target.end(), dry_run).await?;
    let came_in = !dry_run && events.migrated > 0;
    let mut moved = vec![intents, events];
    for table in [Table::Keys, Table::Snapshots] {
        moved.push(table.copy(&mut source, &mut target, dry_run).await?);
    }
    if came_in {
        numbers.pass_over(&mut source.end(), &mut target.end()).await?;
    }
    let rows = migrate_rows::copy(&mut source.end(), &mut target.end(), numbers.beyond, dry_run).await?;
    if came_in || (!dry_run && migrate_rows::brings_places(&rows)) {
        numbers.go_on(&mut target.end()).await?;
    }
    moved.extend(rows);
    target.session.commit().await.map_err(MigrateError::Target)?;
    target.database.close().await;
    drop(source.session);
    source.database.close().await;
    Ok(moved)
}

/// One end of a move.
struct Side {
    database: Database,
    session: Session,
    /// Which of the known tables there are.
    tables: HashSet<String>,
    /// How snapshots are read here.
    snapshots: &'static str,
}

/// Twelve columns of text; the form is the same everywhere but where another server keeps them.
type SnapshotRow = (
    String,
    String,
    Option<String>,
    Option<String>,
    Option<String>,
    String,
    String,
    Option<String>,
    Option<String>,
    Option<String>,
    String,
    String,
);

const SNAPSHOTS: &str = "SELECT id, source_sandbox_id, namespace, name, description, restore_config, state, reason, \
                         message, last_transition_at, created_at, updated_at FROM snapshots ORDER BY id";
/// In files of the first OpenSandbox servers.
const SNAPSHOTS_WITHOUT_NAMESPACE: &str = "SELECT id, source_sandbox_id, NULL, name, description, restore_config, state, reason, \
     message, last_transition_at, created_at, updated_at FROM snapshots ORDER BY id";
/// In databases of an OpenSandbox server.
const TYPED_SNAPSHOTS: &str = "SELECT id, source_sandbox_id, namespace, name, description, restore_config::text, state, reason, message, \
     to_char(last_transition_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"'), \
     to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"'), \
     to_char(updated_at AT TIME ZONE 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS.US\"+00:00\"') \
     FROM public.snapshots ORDER BY id";

impl Side {
    /// Opens a place for reading only.
    async fn read(place: &Place) -> Result<Self, Result<MigrateError, StoreError>> {
        let database = match place {
            Place::Sqlite(path) if !path.is_file() => return Err(Ok(MigrateError::Absent(path.clone()))),
            Place::Sqlite(path) => read_file(path).await.map_err(Err)?,
            Place::Postgres(config) => read_postgres(config).await.map_err(Err)?,
        };
        let session = database.reader().await.map_err(Err)?;
        Self::look(database, session).await.map_err(Err)
    }

    /// Opens a place to be counted in; an absent one counts as empty.
    async fn inspect(place: &Place) -> Result<Self, MigrateError> {
        match Self::read(place).await {
            Err(Ok(MigrateError::Absent(_))) => {
                let nothing = read_file(Path::new(":memory:")).await.map_err(MigrateError::Target)?;
                let session = nothing.reader().await.map_err(MigrateError::Target)?;
                Self::look(nothing, session).await.map_err(MigrateError::Target)
            }
            other => other.map_err(|e| e.unwrap_or_else(MigrateError::Target)),
        }
    }

    /// Opens a place for writing, with its tables brought up to date.
    async fn write(place: &Place) -> Result<Self, MigrateError> {
        let store = match place {
            Place::Sqlite(path) => {
                if path.is_file() && file_in_use(path).await.map_err(MigrateError::Target)? {
                    return Err(MigrateError::InUse);
                }
                SqlStore::open_file(path).await
            }
            Place::Postgres(config) => {
                if postgres_in_use(config).await.map_err(MigrateError::Target)? {
                    return Err(MigrateError::InUse);
                }
                SqlStore::open_postgres(config, postgres::MOVER).await
            }
        };
        let database = store.map_err(MigrateError::Target)?.database;
        let session = database.begin().await.map_err(MigrateError::Target)?;
        Self::look(database, session).await.map_err(MigrateError::Target)
    }

    async fn look(database: Database, mut session: Session) -> Result<Self, StoreError> {
        let (list, other): (_, &'static str) = match &database {
            Database::Sqlite { .. } => (
                "SELECT name FROM sqlite_master WHERE type = 'table'",
                "SELECT 'plain' WHERE EXISTS (SELECT 1 FROM pragma_table_info('snapshots')) \
                 AND NOT EXISTS (SELECT 1 FROM pragma_table_info('snapshots') WHERE name = 'namespace')",
            ),
            Database::Postgres(_) => (
                "SELECT tablename::text FROM pg_tables WHERE schemaname = 'sandglass'",
                "SELECT 'typed' FROM pg_attribute WHERE attrelid = to_regclass('public.snapshots') \
                 AND attname = 'restore_config' AND atttypid = 'jsonb'::regtype",
            ),
        };
        let rows: Vec<(String,)> = session.rows(list, values![]).await?;
        let mut tables: HashSet<String> = rows.into_iter().map(|(name,)| name).collect();
        let known = |name: &String| {
            name == "events"
                || Table::ALL.iter().any(|table| table.name() == name)
                || migrate_rows::is_known(name)
        };
        tables.retain(known);
        let own = tables.contains("snapshots");
        let other: Option<(String,)> = session.row(other, values![]).await?;
        let snapshots = match (other, &database) {
            (Some(_), Database::Sqlite { .. }) => SNAPSHOTS_WITHOUT_NAMESPACE,
            (Some(_), Database::Postgres(_)) if !own => {
                tables.insert("snapshots".into());
                TYPED_SNAPSHOTS
            }
            _ => SNAPSHOTS,
        };
        Ok(Self { database, session, tables, snapshots })
    }

    fn end(&mut self) -> migrate_rows::End<'_> {
        migrate_rows::End { session: &mut self.session, tables: &self.tables }
    }

    fn has(&self, table: Table) -> bool {
        self.tables.contains(table.name())
    }
}

/// A file that no log lies beside is opened as one that nobody changes: then not even a lock file appears.
async fn read_file(path: &Path) -> Result<Database, StoreError> {
    let mut log = path.as_os_str().to_owned();
    log.push("-wal");
    let options = SqliteConnectOptions::new()
        .filename(path)
        .read_only(true)
        .immutable(!Path::new(&log).exists())
        .busy_timeout(Duration::from_secs(5));
    let pool = SqlitePoolOptions::new().max_connections(1).connect_with(options).await.map_err(failed)?;
    Ok(Database::Sqlite { writer: pool.clone(), readers: pool })
}

async fn read_postgres(config: &PostgresConfig) -> Result<Database, StoreError> {
    let options =
        postgres::options(config, postgres::MOVER)?.options([("default_transaction_read_only", "on")]);
    // For the error: the pool would only say that it waited long enough.
    let _ = postgres::connect(&options, config.connect_timeout).await?.close().await;
    let pool = PgPoolOptions::new().max_connections(1).acquire_timeout(config.pool_timeout);
    Ok(Database::Postgres(pool.connect_lazy_with(options)))
}

/// How long somebody who has just stopped may take to let go of a file: connections are closed by threads of their own.
const LETTING_GO: Duration = Duration::from_secs(2);
const LOOK_AGAIN: Duration = Duration::from_millis(20);

/// A running server keeps its connection to the file, and while there is one the journal mode cannot be changed.
async fn file_in_use(path: &Path) -> Result<bool, StoreError> {
    let free = async {
        while is_held(path).await? {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(false)
    };
    tokio::time::timeout(LETTING_GO, free).await.unwrap_or(Ok(true))
}

async fn is_held(path: &Path) -> Result<bool, StoreError> {
    let options = SqliteConnectOptions::new()
        .filename(path)
        .journal_mode(SqliteJournalMode::Delete)
        .busy_timeout(Duration::ZERO);
    match options.connect().await {
        Ok(connection) => connection.close().await.map(|()| false).map_err(failed),
        // 5: SQLITE_BUSY, whatever its extension.
        Err(sqlx::Error::Database(error)) if busy(error.code().as_deref()) => Ok(true),
        Err(error) => Err(failed(error)),
    }
}

fn busy(code: Option<&str>) -> bool {
    code.and_then(|code| code.parse::<u32>().ok()).is_some_and(|code| code & 0xff == 5)
}

async fn postgres_in_use(config: &PostgresConfig) -> Result<bool, StoreError> {
    let options = postgres::options(config, postgres::MOVER)?;
    let mut connection = postgres::connect(&options, config.connect_timeout).await?;
    let servers = postgres::others(&mut connection).await?;
    let _ = connection.close().await;
    Ok(servers > 0)
}

#[derive(Clone, Copy)]
enum Table {
    Intents,
    Keys,
    Snapshots,
}

impl Table {
    const ALL: [Self; 3] = [Self::Intents, Self::Keys, Self::Snapshots];

    fn name(self) -> &'static str {
        match self {
            Self::Intents => "intents",
            Self::Keys => "idempotency_keys",
            Self::Snapshots => "snapshots",
        }
    }

    async fn copy(self, from: &mut Side, to: &mut Side, dry_run: bool) -> Result<Moved, MigrateError> {
        let mut moved = Moved::new(self.name());
        if !from.has(self) {
            return Ok(moved);
        }
        match self {
            Self::Intents => {
                let rows: Vec<(String, i64, String)> = from
                    .session
                    .rows("SELECT sandbox_id, generation, body FROM intents ORDER BY sandbox_id", values![])
                    .await
                    .map_err(MigrateError::Source)?;
                for (id, generation, body) in rows {
                    let row = values![id.as_str(), generation, body];
                    moved.count(self.put(to, &id, row, dry_run).await.map_err(MigrateError::Target)?);
                }
            }
            Self::Keys => {
                let rows: Vec<(String, String, String, i64)> = from
                    .session
                    .rows(
                        "SELECT key, fingerprint, sandbox_id, at_ms FROM idempotency_keys ORDER BY key",
                        values![],
                    )
                    .await
                    .map_err(MigrateError::Source)?;
                for (key, fingerprint, id, at) in rows {
                    let row = values![key.as_str(), fingerprint, id, at];
                    moved.count(self.put(to, &key, row, dry_run).await.map_err(MigrateError::Target)?);
                }
            }
            Self::Snapshots => {
                let rows: Vec<SnapshotRow> =
                    from.session.rows(from.snapshots, values![]).await.map_err(MigrateError::Source)?;
                for row in rows {
                    let id = row.0.clone();
                    let put = self.put(to, &id, snapshot(row), dry_run).await;
                    moved.count(put.map_err(MigrateError::Target)?);
                }
            }
        }
        Ok(moved)
    }

    /// The question whether a row is there, and the statement that puts it there.
    fn statements(self) -> (&'static str, &'static str) {
        match self {
            Self::Intents => (
                "SELECT sandbox_id FROM intents WHERE sandbox_id = $1",
                "INSERT INTO intents (sandbox_id, generation, body) VALUES ($1, $2, $3)",
            ),
            Self::Keys => (
                "SELECT key FROM idempotency_keys WHERE key = $1",
                "INSERT INTO idempotency_keys (key, fingerprint, sandbox_id, at_ms) VALUES ($1, $2, $3, $4)",
            ),
            Self::Snapshots => (
                "SELECT id FROM snapshots WHERE id = $1",
                "INSERT INTO snapshots (id, source_sandbox_id, namespace, name, description, restore_config, state, \
                 reason, message, last_transition_at, created_at, updated_at) \
                 VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
            ),
        }
    }

    async fn known(self, to: &mut Side, id: &str) -> Result<bool, StoreError> {
        if !to.has(self) {
            return Ok(false);
        }
        // In a database of an OpenSandbox server the rows are taken over when it is opened for the first time.
        let question = match self {
            Self::Snapshots if to.snapshots == TYPED_SNAPSHOTS => {
                "SELECT id FROM public.snapshots WHERE id = $1"
            }
            _ => self.statements().0,
        };
        let found: Option<(String,)> = to.session.row(question, values![id]).await?;
        Ok(found.is_some())
    }

    /// Whether the row was not there yet.
    async fn put(self, to: &mut Side, id: &str, row: Vec<Value>, dry_run: bool) -> Result<bool, StoreError> {
        if self.known(to, id).await? {
            return Ok(false);
        }
        if !dry_run {
            to.session.execute(self.statements().1, row).await?;
        }
        Ok(true)
    }
}

fn snapshot(row: SnapshotRow) -> Vec<Value> {
    let (
        id,
        source,
        namespace,
        name,
        description,
        restore,
        state,
        reason,
        message,
        changed,
        created,
        updated,
    ) = row;
    values![
        id,
        source,
        namespace.as_deref(),
        name.as_deref(),
        description.as_deref(),
        restore,
        state,
        reason.as_deref(),
        message.as_deref(),
        changed.as_deref(),
        created,
        updated
    ]
}
