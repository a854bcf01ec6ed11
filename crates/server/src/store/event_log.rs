//! The history of everything, in the order of its numbers: for those who tell others of it.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{EventRecord, StoreError},
};

use super::{
    database::{Database, values, within},
    sql_store::SqlStore,
};

/// Before the identifier of an image build, where sandboxes have theirs alone.
pub const OF_BUILD: &str = "build:";

/// A line with its number and what it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoggedEvent {
    pub seq: u64,
    /// A sandbox's identifier, or [`OF_BUILD`] and that of an image build.
    pub subject: String,
    pub event: EventRecord,
}

impl SqlStore {
    /// The number of the newest line, when no smaller one can appear any more. 0 while there is none.
    ///
    /// # Errors
    /// When the store cannot be read, or a writer does not end in time.
    pub async fn settled(&self) -> Result<u64, StoreError> {
        within(self.limit, async {
            const NEWEST: &str = "SELECT MAX(seq) FROM events";
            let newest: Option<(Option<i64>,)> = match &self.database {
                // There is one writer, and its commits are in the order of the numbers.
                Database::Sqlite { .. } => self.database.reader().await?.row(NEWEST, values![]).await?,
                Database::Postgres(_) => {
                    let mut tx = self.database.begin().await?;
                    // A writer that hangs must not hold up those that wait behind this.
                    tx.execute("SET LOCAL lock_timeout = '1s'", values![]).await?;
                    let alone = "SELECT pg_advisory_xact_lock(hashtextextended('sandglass events', 0))";
                    tx.execute(alone, values![]).await?;
                    let newest = tx.row(NEWEST, values![]).await?;
                    tx.commit().await?;
                    newest
                }
            };
            Ok(newest.and_then(|(newest,)| newest).and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
        })
        .await
    }

    /// The lines of a sandbox's history that say whose it was and how it looked; kind and message, oldest first.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn kept_of(&self, id: SandboxId) -> Result<Vec<(String, String)>, StoreError> {
        within(self.limit, async {
            let mut on = self.database.reader().await?;
            let sql = "SELECT kind, message FROM events WHERE sandbox_id = $1 AND kind IN ('owner', 'record') ORDER BY seq";
            on.rows(sql, values![id.to_string()]).await
        })
        .await
    }

    /// Up to `limit` lines after `after` and not beyond `settled`, whatever they are about.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn logged(&self, after: u64, settled: u64, limit: u32) -> Result<Vec<LoggedEvent>, StoreError> {
        within(self.limit, async {
            let rows: Vec<(i64, String, i64, String, String)> = self
                .database
                .reader()
                .await?
                .rows(
                    "SELECT seq, sandbox_id, at_ms, kind, message FROM events WHERE seq > $1 AND seq <= $2 \
                     ORDER BY seq LIMIT $3",
                    values![after, settled, i64::from(limit)],
                )
                .await?;
            let line = |(seq, subject, at, kind, message): (i64, String, i64, String, String)| LoggedEvent {
                seq: u64::try_from(seq).unwrap_or(0),
                subject,
                event: EventRecord { at: Timestamp::clamped(at), kind, message },
            };
            Ok(rows.into_iter().map(line).collect())
        })
        .await
    }
}
