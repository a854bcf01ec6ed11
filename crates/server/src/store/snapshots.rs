//! Rows of snapshots, in the form that the OpenSandbox server reads and writes in the same SQLite file.

use sandglass_sandbox::{
    SnapshotId, Timestamp,
    ports::store::{SnapshotFilter, StoreError},
    snapshot::{RestoreConfig, SnapshotRecord, SnapshotState},
};
use serde::{Deserialize, Serialize};

use super::database::{Session, values};

/// The backend of a row that names none: the OpenSandbox server marks only its other one.
const DEFAULT_BACKEND: &str = "docker";

/// Id, source, namespace, name, description, restore configuration, state, reason, message, last transition, creation.
type Row = (
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
);

macro_rules! select {
    () => {
        "SELECT id, source_sandbox_id, namespace, name, description, restore_config, state, reason, message, \
         last_transition_at, created_at FROM snapshots "
    };
}

/// The filters of a list. An absent namespace means the rows without one.
macro_rules! matching {
    () => {
        "WHERE COALESCE(namespace, '') = COALESCE($1, '') AND ($2 IS NULL OR source_sandbox_id = $2) \
         AND ($3 IS NULL OR name = $3) AND state IN ($4, $5, $6, $7) "
    };
}

/// `restore_config` as it is written. Both members are always there.
#[derive(Serialize, Deserialize)]
struct Restore {
    #[serde(default)]
    backend: Option<String>,
    #[serde(default)]
    image: Option<String>,
}

pub(super) async fn insert(on: &mut Session, snapshot: &SnapshotRecord) -> Result<(), StoreError> {
    let changed = iso(snapshot.last_transition_at);
    on.execute(
        "INSERT INTO snapshots (id, source_sandbox_id, namespace, name, description, restore_config, state, reason, \
         message, last_transition_at, created_at, updated_at) \
         VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
        values![
            snapshot.id.to_string(),
            snapshot.source.to_string(),
            snapshot.namespace.as_deref(),
            snapshot.name.as_deref(),
            snapshot.description.as_deref(),
            restore_text(snapshot.restore.as_ref()),
            snapshot.state.word(),
            snapshot.reason.as_str(),
            snapshot.message.as_deref(),
            changed.clone(),
            iso(snapshot.created_at),
            changed,
        ],
    )
    .await?;
    Ok(())
}

/// What never changes is not written again: another server may have written it with more digits.
pub(super) async fn replace(
    on: &mut Session,
    expected: SnapshotState,
    snapshot: &SnapshotRecord,
) -> Result<bool, StoreError> {
    let changed = iso(snapshot.last_transition_at);
    let written = on
        .execute(
            "UPDATE snapshots SET name = $1, description = $2, restore_config = $3, state = $4, reason = $5, \
             message = $6, last_transition_at = $7, updated_at = $8 WHERE id = $9 AND state = $10",
            values![
                snapshot.name.as_deref(),
                snapshot.description.as_deref(),
                restore_text(snapshot.restore.as_ref()),
                snapshot.state.word(),
                snapshot.reason.as_str(),
                snapshot.message.as_deref(),
                changed.clone(),
                changed,
                snapshot.id.to_string(),
                expected.word(),
            ],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn delete(
    on: &mut Session,
    id: SnapshotId,
    expected: SnapshotState,
) -> Result<bool, StoreError> {
    let written = on
        .execute(
            "DELETE FROM snapshots WHERE id = $1 AND state = $2",
            values![id.to_string(), expected.word()],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn find(on: &mut Session, id: SnapshotId) -> Result<Option<SnapshotRecord>, StoreError> {
    let row: Option<Row> = on.row(concat!(select!(), "WHERE id = $1"), values![id.to_string()]).await?;
    row.map(record).transpose()
}

pub(super) async fn count(on: &mut Session, filter: &SnapshotFilter) -> Result<u64, StoreError> {
    let [a, b, c, d] = wanted(filter);
    let row: Option<(i64,)> = on
        .row(
            concat!("SELECT COUNT(*) FROM snapshots ", matching!()),
            values![
                filter.namespace.as_deref(),
                filter.source.map(|id| id.to_string()).as_deref(),
                filter.name.as_deref(),
                a,
                b,
                c,
                d
            ],
        )
        .await?;
    Ok(row.map_or(0, |(count,)| u64::try_from(count).unwrap_or(0)))
}

pub(super) async fn page(
    on: &mut Session,
    filter: &SnapshotFilter,
    offset: u64,
    limit: u64,
) -> Result<Vec<SnapshotRecord>, StoreError> {
    let [a, b, c, d] = wanted(filter);
    let rows: Vec<Row> = on
        .rows(
            concat!(select!(), matching!(), "ORDER BY created_at DESC, id DESC LIMIT $8 OFFSET $9"),
            values![
                filter.namespace.as_deref(),
                filter.source.map(|id| id.to_string()).as_deref(),
                filter.name.as_deref(),
                a,
                b,
                c,
                d,
                limit,
                offset
            ],
        )
        .await?;
    Ok(readable(rows))
}

pub(super) async fn in_state(
    on: &mut Session,
    state: SnapshotState,
) -> Result<Vec<SnapshotRecord>, StoreError> {
    let rows: Vec<Row> = on
        .rows(concat!(select!(), "WHERE state = $1 ORDER BY created_at, id"), values![state.word()])
        .await?;
    Ok(readable(rows))
}

/// The states as a list of fixed length; what is left over matches nothing.
fn wanted(filter: &SnapshotFilter) -> [&'static str; 4] {
    SnapshotState::ALL.map(|state| {
        if filter.states.is_empty() || filter.states.contains(&state) { state.word() } else { "" }
    })
}

/// One row that another program wrote and that means nothing here must not hide all others.
fn readable(rows: Vec<Row>) -> Vec<SnapshotRecord> {
    rows.into_iter()
        .filter_map(|row| {
            let id = row.0.clone();
            record(row)
                .inspect_err(|error| tracing::warn!(snapshot = %id, %error, "a snapshot is left out"))
                .ok()
        })
        .collect()
}

fn record(row: Row) -> Result<SnapshotRecord, StoreError> {
    let (id, source, namespace, name, description, restore, state, reason, message, changed, created) = row;
    let unreadable = |what: &str| StoreError::Corrupt(format!("a snapshot's {what} is unreadable"));
    let created_at = instant(&created).ok_or_else(|| unreadable("creation time"))?;
    let last_transition_at = match changed {
        None => created_at,
        Some(text) => instant(&text).ok_or_else(|| unreadable("transition time"))?,
    };
    let restore: Restore = serde_json::from_str(&restore).map_err(|_| unreadable("restore configuration"))?;
    Ok(SnapshotRecord {
        id: id.parse().map_err(|_| unreadable("id"))?,
        source: source.parse().map_err(|_| unreadable("source"))?,
        namespace: namespace.filter(|text| !text.is_empty()),
        name,
        description,
        restore: restore.image.filter(|image| !image.is_empty()).map(|image| RestoreConfig {
            backend: restore
                .backend
                .filter(|b| !b.trim().is_empty())
                .unwrap_or_else(|| DEFAULT_BACKEND.into()),
            image,
        }),
        state: SnapshotState::of_word(&state).ok_or_else(|| unreadable("state"))?,
        reason: reason.unwrap_or_default(),
        message,
        last_transition_at,
        created_at,
    })
}

fn restore_text(restore: Option<&RestoreConfig>) -> String {
    let restore =
        Restore { backend: restore.map(|r| r.backend.clone()), image: restore.map(|r| r.image.clone()) };
    serde_json::to_string(&restore).expect("two members of text")
}

/// ISO 8601 with six digits and an offset. Always the same length, so that text sorts as time.
pub(super) fn iso(at: Timestamp) -> String {
    // No timestamp lies outside of what can be written.
    let at = jiff::Timestamp::from_millisecond(at.as_millis()).unwrap_or_default();
    format!("{at:.6}").replace('Z', "+00:00")
}

/// The instant of a text with an offset, or without one in UTC.
pub(super) fn instant(text: &str) -> Option<Timestamp> {
    let at = text.parse::<jiff::Timestamp>().or_else(|_| {
        text.parse::<jiff::civil::DateTime>()
            .and_then(|local| local.to_zoned(jiff::tz::TimeZone::UTC))
            .map(|zoned| zoned.timestamp())
    });
    at.ok().map(|at| Timestamp::clamped(at.as_millisecond()))
}
