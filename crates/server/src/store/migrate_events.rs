//! Moving history, and the places up to which receivers of events were told of it.
//!
//! History keeps its numbers, since readers remember them. Where the target has given numbers of its own, those that come in lie beyond
//! them, and so do the places of the webhooks that come with it; a sandbox whose history the target has is left alone. So what was told is
//! not told again, and what was not is told once.
//!
//! Numbers that were given to lines which are forgotten count: a webhook stands behind them, and would miss what got them again.

use std::collections::{HashMap, HashSet};

use sandglass_sandbox::ports::StoreError;

use super::{
    database::{Session, values},
    migrate::{MigrateError, Moved},
    migrate_rows::End,
};

const PAGE: i64 = 1000;
const EVENTS: &str = "events";
const WEBHOOKS: &str = "webhooks";

/// Which numbers both sides had before anything was moved.
pub(super) struct Numbers {
    /// What is added to the numbers that come in: the last that the target has given.
    pub(super) beyond: i64,
    /// The last that the source has given.
    last: i64,
    /// The newest line of the target.
    newest: i64,
    /// The newest line of the source.
    newest_of_source: i64,
}

impl Numbers {
    pub(super) async fn of(from: &mut End<'_>, to: &mut End<'_>) -> Result<Self, MigrateError> {
        let (newest_of_source, last) = numbers(from).await.map_err(MigrateError::Source)?;
        let (newest, beyond) = numbers(to).await.map_err(MigrateError::Target)?;
        Ok(Self { beyond, last, newest, newest_of_source })
    }

    /// Lines of sandboxes and builds of which the target has none.
    pub(super) async fn copy(
        &self,
        from: &mut End<'_>,
        to: &mut End<'_>,
        dry_run: bool,
    ) -> Result<Moved, MigrateError> {
        let mut moved = Moved::new(EVENTS);
        if !from.tables.contains(EVENTS) {
            return Ok(moved);
        }
        let mut wanted: HashMap<String, bool> = HashMap::new();
        let mut seen = 0;
        loop {
            let page: Vec<(i64, String, i64, String, String)> = from
                .session
                .rows(
                    "SELECT seq, sandbox_id, at_ms, kind, message FROM events WHERE seq > $1 ORDER BY seq LIMIT $2",
                    values![seen, PAGE],
                )
                .await
                .map_err(MigrateError::Source)?;
            let Some((last, ..)) = page.last() else { break };
            seen = *last;
            for (seq, id, at, kind, message) in page {
                let wanted = match wanted.get(&id) {
                    Some(wanted) => *wanted,
                    None => {
                        let known = is_known(to, &id).await.map_err(MigrateError::Target)?;
                        *wanted.entry(id.clone()).or_insert(!known)
                    }
                };
                if wanted && !dry_run {
                    to.session
                        .execute(
                            "INSERT INTO events (sandbox_id, seq, at_ms, kind, message) VALUES ($1, $2, $3, $4, $5)",
                            values![id, seq.saturating_add(self.beyond), at, kind, message],
                        )
                        .await
                        .map_err(MigrateError::Target)?;
                }
                moved.count(wanted);
            }
        }
        Ok(moved)
    }

    /// After the lines came in, and before the webhooks that come with them do: those that were there before were told everything that is
    /// theirs, and what came in is told by those that knew it. One that both sides have goes on where the source has not told all of it.
    pub(super) async fn pass_over(&self, from: &mut End<'_>, to: &mut End<'_>) -> Result<(), MigrateError> {
        if !to.tables.contains(WEBHOOKS) {
            return Ok(());
        }
        let behind = standing(from).await.map_err(MigrateError::Source)?.into_iter();
        let behind: HashSet<String> =
            behind.filter(|(_, place)| *place < self.newest_of_source).map(|(id, _)| id).collect();
        for (id, place) in standing(to).await.map_err(MigrateError::Target)? {
            if place >= self.newest && !behind.contains(&id) {
                to.session
                    .execute(
                        "UPDATE webhooks SET read_to = $1 WHERE id = $2",
                        values![self.last.saturating_add(self.beyond), id],
                    )
                    .await
                    .map_err(MigrateError::Target)?;
            }
        }
        Ok(())
    }

    /// The next line gets a number that neither side has given.
    pub(super) async fn go_on(&self, to: &mut End<'_>) -> Result<(), MigrateError> {
        let last = self.last.saturating_add(self.beyond);
        if last == 0 {
            return Ok(());
        }
        raise(to.session, last).await.map_err(MigrateError::Target)
    }
}

/// Webhooks, with the place up to which each was told.
async fn standing(on: &mut End<'_>) -> Result<Vec<(String, i64)>, StoreError> {
    if !on.tables.contains(WEBHOOKS) {
        return Ok(Vec::new());
    }
    on.session.rows("SELECT id, read_to FROM webhooks ORDER BY id", values![]).await
}

async fn is_known(on: &mut End<'_>, id: &str) -> Result<bool, StoreError> {
    if !on.tables.contains(EVENTS) {
        return Ok(false);
    }
    let sql = "SELECT sandbox_id FROM events WHERE sandbox_id = $1 LIMIT 1";
    let found: Option<(String,)> = on.session.row(sql, values![id]).await?;
    Ok(found.is_some())
}

/// The newest line, and the last number that was given.
async fn numbers(on: &mut End<'_>) -> Result<(i64, i64), StoreError> {
    if !on.tables.contains(EVENTS) {
        return Ok((0, 0));
    }
    let newest: Option<(Option<i64>,)> = on.session.row("SELECT MAX(seq) FROM events", values![]).await?;
    let newest = newest.and_then(|(newest,)| newest).unwrap_or(0);
    let given: Option<(i64,)> = match on.session {
        Session::Sqlite(_) | Session::SqliteTransaction(_) => {
            // Files of the first version have no counter.
            let table = "SELECT name FROM sqlite_master WHERE name = 'sqlite_sequence'";
            let counts: Option<(String,)> = on.session.row(table, values![]).await?;
            match counts {
                Some(_) => {
                    on.session.row("SELECT seq FROM sqlite_sequence WHERE name = 'events'", values![]).await?
                }
                None => None,
            }
        }
        Session::Postgres(_) | Session::PostgresTransaction(_) => {
            let sql = "SELECT last_value FROM sandglass.events_seq WHERE is_called";
            on.session.row(sql, values![]).await?
        }
    };
    Ok((newest, given.map_or(newest, |(given,)| given.max(newest))))
}

/// Sees to it that numbers go on after this one.
async fn raise(on: &mut Session, last: i64) -> Result<(), StoreError> {
    match on {
        Session::Sqlite(_) | Session::SqliteTransaction(_) => {
            let absent = "INSERT INTO sqlite_sequence (name, seq) SELECT 'events', 0 \
                          WHERE NOT EXISTS (SELECT 1 FROM sqlite_sequence WHERE name = 'events')";
            on.execute(absent, values![]).await?;
            let raised = "UPDATE sqlite_sequence SET seq = $1 WHERE name = 'events' AND seq < $1";
            on.execute(raised, values![last]).await?;
        }
        Session::Postgres(_) | Session::PostgresTransaction(_) => {
            let sql =
                "SELECT setval('sandglass.events_seq', GREATEST($1, last_value)) FROM sandglass.events_seq";
            on.execute(sql, values![last]).await?;
        }
    }
    Ok(())
}
