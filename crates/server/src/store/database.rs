//! One way to run a statement on either engine.
//!
//! Owns the pools and the translation of their errors. It knows no table.

use std::time::Duration;

use sandglass_sandbox::ports::StoreError;
use sqlx::{
    FromRow, PgConnection, PgPool, Postgres, Sqlite, SqliteConnection, SqlitePool, Transaction,
    pool::PoolConnection, postgres::PgRow, sqlite::SqliteRow,
};

/// Write transactions take the lock at once: one that upgrades later fails without waiting.
const BEGIN: &str = "BEGIN IMMEDIATE";

/// Connections to one database.
#[derive(Clone)]
pub(super) enum Database {
    /// One writer, since the engine allows no more; readers do not wait for it.
    Sqlite {
        writer: SqlitePool,
        readers: SqlitePool,
    },
    Postgres(PgPool),
}

impl Database {
    /// A connection for statements that change nothing.
    pub(super) async fn reader(&self) -> Result<Session, StoreError> {
        match self {
            Self::Sqlite { readers, .. } => readers.acquire().await.map(Session::Sqlite),
            Self::Postgres(pool) => pool.acquire().await.map(Session::Postgres),
        }
        .map_err(failed)
    }

    /// A connection for a single statement that is its own transaction.
    pub(super) async fn writer(&self) -> Result<Session, StoreError> {
        match self {
            Self::Sqlite { writer, .. } => writer.acquire().await.map(Session::Sqlite),
            Self::Postgres(pool) => pool.acquire().await.map(Session::Postgres),
        }
        .map_err(failed)
    }

    /// A transaction; undone unless it is committed.
    pub(super) async fn begin(&self) -> Result<Session, StoreError> {
        match self {
            Self::Sqlite { writer, .. } => writer.begin_with(BEGIN).await.map(Session::SqliteTransaction),
            Self::Postgres(pool) => pool.begin().await.map(Session::PostgresTransaction),
        }
        .map_err(failed)
    }

    /// Writes everything out and closes the connections.
    pub(super) async fn close(&self) {
        match self {
            Self::Sqlite { writer, readers } => {
                readers.close().await;
                writer.close().await;
            }
            Self::Postgres(pool) => pool.close().await,
        }
    }
}

/// A value of a statement: nothing but text and integers, which both engines spell alike.
pub(super) enum Value {
    Text(String),
    Maybe(Option<String>),
    Int(i64),
}

impl Value {
    /// The same value once more.
    pub(super) fn again(&self) -> Self {
        match self {
            Self::Text(text) => Self::Text(text.clone()),
            Self::Maybe(text) => Self::Maybe(text.clone()),
            Self::Int(number) => Self::Int(*number),
        }
    }
}

impl From<i64> for Value {
    fn from(value: i64) -> Self {
        Self::Int(value)
    }
}

/// Unsigned numbers are limits and counters; the engines have no larger type.
impl From<u64> for Value {
    fn from(value: u64) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(storable(value))
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(storable(&value))
    }
}

impl From<Option<&str>> for Value {
    fn from(value: Option<&str>) -> Self {
        Self::Maybe(value.map(storable))
    }
}

/// PostgreSQL has no NUL in text and refuses the whole row. Both engines keep the same replacement, so that filters find it.
fn storable(text: &str) -> String {
    text.replace('\0', "\u{FFFD}")
}

/// Shorthand for the values of a statement.
macro_rules! values {
    ($($value:expr),* $(,)?) => { vec![$($crate::store::database::Value::from($value)),*] };
}
pub(super) use values;

/// A row that either engine can deliver.
pub(super) trait Row:
    Send + Unpin + for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, PgRow>
{
}

impl<R> Row for R where R: Send + Unpin + for<'r> FromRow<'r, SqliteRow> + for<'r> FromRow<'r, PgRow> {}

/// A connection, in a transaction or not.
pub(super) enum Session {
    Sqlite(PoolConnection<Sqlite>),
    SqliteTransaction(Transaction<'static, Sqlite>),
    Postgres(PoolConnection<Postgres>),
    PostgresTransaction(Transaction<'static, Postgres>),
}

enum Either<'c> {
    Sqlite(&'c mut SqliteConnection),
    Postgres(&'c mut PgConnection),
}

/// The same body for either engine: `$run` sees a query with all values bound and the connection it runs on.
macro_rules! on_either {
    ($session:expr, $query:expr, $values:expr, |$bound:ident, $connection:ident| $run:expr) => {
        match $session.either() {
            Either::Sqlite($connection) => {
                let $bound = on_either!(@bind $query, $values);
                $run
            }
            Either::Postgres($connection) => {
                let $bound = on_either!(@bind $query, $values);
                $run
            }
        }
    };
    (@bind $query:expr, $values:expr) => {
        $values.into_iter().fold($query, |query, value| match value {
            Value::Text(text) => query.bind(text),
            Value::Maybe(text) => query.bind(text),
            Value::Int(number) => query.bind(number),
        })
    };
}

impl Session {
    fn either(&mut self) -> Either<'_> {
        match self {
            Self::Sqlite(connection) => Either::Sqlite(connection),
            Self::SqliteTransaction(transaction) => Either::Sqlite(transaction),
            Self::Postgres(connection) => Either::Postgres(connection),
            Self::PostgresTransaction(transaction) => Either::Postgres(transaction),
        }
    }

    /// Runs a statement and says how many rows it changed.
    pub(super) async fn execute(&mut self, sql: &'static str, values: Vec<Value>) -> Result<u64, StoreError> {
        on_either!(self, sqlx::query(sql), values, |query, connection| {
            query.execute(connection).await.map(|done| done.rows_affected())
        })
        .map_err(failed)
    }

    /// Every row of a query.
    pub(super) async fn rows<R: Row>(
        &mut self,
        sql: &'static str,
        values: Vec<Value>,
    ) -> Result<Vec<R>, StoreError> {
        on_either!(self, sqlx::query_as(sql), values, |query, connection| query.fetch_all(connection).await)
            .map_err(failed)
    }

    /// The first row of a query, if there is one.
    pub(super) async fn row<R: Row>(
        &mut self,
        sql: &'static str,
        values: Vec<Value>,
    ) -> Result<Option<R>, StoreError> {
        on_either!(self, sqlx::query_as(sql), values, |query, connection| query
            .fetch_optional(connection)
            .await)
        .map_err(failed)
    }

    /// Makes the changes last. Without a transaction they do already.
    pub(super) async fn commit(self) -> Result<(), StoreError> {
        match self {
            Self::Sqlite(_) | Self::Postgres(_) => Ok(()),
            Self::SqliteTransaction(transaction) => transaction.commit().await,
            Self::PostgresTransaction(transaction) => transaction.commit().await,
        }
        .map_err(failed)
    }
}

/// A row that cannot be read is a different matter than a database that does not answer.
pub(super) fn failed(error: sqlx::Error) -> StoreError {
    match error {
        sqlx::Error::PoolTimedOut => StoreError::Unavailable(
            "no connection in time: the database is down, unreachable or out of connections".into(),
        ),
        sqlx::Error::ColumnDecode { .. }
        | sqlx::Error::Decode(_)
        | sqlx::Error::ColumnNotFound(_)
        | sqlx::Error::ColumnIndexOutOfBounds { .. } => StoreError::Corrupt(error.to_string()),
        other => StoreError::Unavailable(other.to_string()),
    }
}

/// Bounds what a database that hangs can hold up. What was asked may have happened all the same.
pub(super) async fn within<T>(
    limit: Option<Duration>,
    work: impl Future<Output = Result<T, StoreError>> + Send,
) -> Result<T, StoreError> {
    match limit {
        None => work.await,
        Some(limit) => tokio::time::timeout(limit, work)
            .await
            .unwrap_or_else(|_| Err(StoreError::Unavailable(format!("no answer within {limit:?}")))),
    }
}
