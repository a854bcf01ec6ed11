//! Rows of image builds, of their recent failures, and of the numbers in names of artifacts.

use sandglass_builds::{
    build::{BuildState, ImageBuild, Slot},
    key::BuildKey,
    ports::{BuildFilter, Commit, Inserted, Negative, StoreError},
};
use sandglass_sandbox::{ImageBuildId, Timestamp};
use serde::{Serialize, de::DeserializeOwned};
use sha2::{Digest, Sha256};

use super::database::{Session, values};

/// What ended never sorts after this.
const NOT_FINISHED: i64 = i64::MAX;

/// The namespace as rows have it: none is empty, which no namespace is.
pub(super) fn namespace_text(namespace: Option<&str>) -> &str {
    namespace.unwrap_or_default()
}

pub(super) fn body(row: &impl Serialize) -> String {
    serde_json::to_string(row).expect("rows hold only maps with text keys")
}

pub(super) fn read<T: DeserializeOwned>(what: &str, body: &str) -> Result<T, StoreError> {
    serde_json::from_str(body).map_err(|e| StoreError::Corrupt(format!("{what} is unreadable: {e}")))
}

/// A row that a newer server wrote and that means nothing here must not hide all others.
pub(super) fn readable<T: DeserializeOwned>(what: &str, rows: Vec<(String,)>) -> Vec<T> {
    let kept = |(body,): &(String,)| {
        read(what, body).inspect_err(|error| tracing::warn!(%error, "a row is left out")).ok()
    };
    rows.iter().filter_map(kept).collect()
}

/// A slot as a text of fixed length: an index takes no long one.
pub(super) fn slot_text(slot: &Slot) -> String {
    let digest = Sha256::digest(body(slot).as_bytes());
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn in_flight_text(build: &ImageBuild) -> Option<String> {
    (!build.state.terminal()).then(|| slot_text(&build.slot))
}

fn finished(build: &ImageBuild) -> i64 {
    build.finished_at.map_or(NOT_FINISHED, Timestamp::as_millis)
}

pub(super) async fn insert(on: &mut Session, build: &ImageBuild) -> Result<Option<Inserted>, StoreError> {
    let written = on
        .execute(
            "INSERT INTO image_builds (id, version, namespace, runtime, repository_key, state, in_flight, owes, \
             created_ms, finished_ms, body) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11) \
             ON CONFLICT DO NOTHING",
            values![
                build.id.to_string(),
                build.version,
                namespace_text(build.slot.namespace.as_deref()),
                build.slot.runtime.as_str(),
                build.plan.repository_key.as_str(),
                build.state.word(),
                in_flight_text(build).as_deref(),
                i64::from(!build.obligations.is_empty()),
                build.created_at.as_millis(),
                finished(build),
                body(build),
            ],
        )
        .await?;
    if written == 1 {
        return Ok(Some(Inserted::Written));
    }
    if find(on, build.id).await?.is_some() {
        return Ok(Some(Inserted::InFlight(build.id)));
    }
    Ok(in_flight(on, &build.slot).await?.map(|other| Inserted::InFlight(other.id)))
}

/// Replaces the row; whether its version was the expected one.
pub(super) async fn replace(on: &mut Session, commit: &Commit<'_>) -> Result<bool, StoreError> {
    let build = commit.build;
    let written = on
        .execute(
            "UPDATE image_builds SET version = $1, state = $2, in_flight = $3, owes = $4, finished_ms = $5, body = $6 \
             WHERE id = $7 AND version = $8",
            values![
                build.version,
                build.state.word(),
                in_flight_text(build).as_deref(),
                i64::from(!build.obligations.is_empty()),
                finished(build),
                body(build),
                build.id.to_string(),
                commit.expected,
            ],
        )
        .await?;
    Ok(written == 1)
}

pub(super) async fn find(on: &mut Session, id: ImageBuildId) -> Result<Option<ImageBuild>, StoreError> {
    let row: Option<(String,)> =
        on.row("SELECT body FROM image_builds WHERE id = $1", values![id.to_string()]).await?;
    row.map(|(body,)| read("an image build", &body)).transpose()
}

pub(super) async fn in_flight(on: &mut Session, slot: &Slot) -> Result<Option<ImageBuild>, StoreError> {
    let row: Option<(String,)> =
        on.row("SELECT body FROM image_builds WHERE in_flight = $1", values![slot_text(slot)]).await?;
    row.map(|(body,)| read("an image build", &body)).transpose()
}

/// Under way, or with obligations left.
pub(super) async fn open(on: &mut Session, runtime: &str) -> Result<Vec<ImageBuild>, StoreError> {
    let rows = on
        .rows(
            "SELECT body FROM image_builds WHERE runtime = $1 AND (owes = 1 OR in_flight IS NOT NULL)",
            values![runtime],
        )
        .await?;
    Ok(readable("an image build", rows))
}

pub(super) async fn ended(
    on: &mut Session,
    runtime: &str,
    before: Timestamp,
) -> Result<Vec<ImageBuild>, StoreError> {
    let rows = on
        .rows(
            "SELECT body FROM image_builds WHERE runtime = $1 AND owes = 0 AND in_flight IS NULL AND finished_ms < $2",
            values![runtime, before.as_millis()],
        )
        .await?;
    Ok(readable("an image build", rows))
}

macro_rules! matching {
    () => {
        "FROM image_builds WHERE namespace = $1 AND ($2 IS NULL OR repository_key = $2) \
         AND state IN ($3, $4, $5, $6, $7, $8, $9, $10) "
    };
}

pub(super) async fn page(
    on: &mut Session,
    filter: &BuildFilter,
    offset: u64,
    limit: u64,
) -> Result<(Vec<ImageBuild>, u64), StoreError> {
    let narrowed = || {
        let mut values =
            values![namespace_text(filter.namespace.as_deref()), filter.repository_key.as_deref()];
        for state in BuildState::ALL {
            let kept = filter.states.is_empty() || filter.states.contains(&state);
            values.push(if kept { state.word() } else { "" }.into());
        }
        values
    };
    let count: Option<(i64,)> = on.row(concat!("SELECT COUNT(*) ", matching!()), narrowed()).await?;
    let mut paged = narrowed();
    paged.extend(values![limit, offset]);
    let rows = on
        .rows(
            concat!("SELECT body ", matching!(), "ORDER BY created_ms DESC, id DESC LIMIT $11 OFFSET $12"),
            paged,
        )
        .await?;
    let total = count.map_or(0, |(count,)| u64::try_from(count).unwrap_or(0));
    Ok((readable("an image build", rows), total))
}

pub(super) async fn delete(on: &mut Session, id: ImageBuildId, expected: u64) -> Result<bool, StoreError> {
    let gone = on
        .execute("DELETE FROM image_builds WHERE id = $1 AND version = $2", values![id.to_string(), expected])
        .await?;
    Ok(gone == 1)
}

pub(super) async fn reserve_ordinal(
    on: &mut Session,
    runtime: &str,
    key: &BuildKey,
) -> Result<u64, StoreError> {
    let row: Option<(i64,)> = on
        .row(
            "INSERT INTO image_ordinals (runtime, digits, given) VALUES ($1, $2, 1) \
             ON CONFLICT (runtime, digits) DO UPDATE SET given = image_ordinals.given + 1 RETURNING given",
            values![runtime, &key.as_str()[..12]],
        )
        .await?;
    row.and_then(|(given,)| u64::try_from(given).ok())
        .ok_or_else(|| StoreError::Corrupt("an image's number is unreadable".into()))
}

pub(super) async fn negative(on: &mut Session, slot: &Slot) -> Result<Option<Negative>, StoreError> {
    let row: Option<(String,)> =
        on.row("SELECT body FROM image_build_failures WHERE slot = $1", values![slot_text(slot)]).await?;
    row.map(|(body,)| read("a remembered failure", &body)).transpose()
}

pub(super) async fn remember(on: &mut Session, negative: &Negative) -> Result<(), StoreError> {
    on.execute(
        "INSERT INTO image_build_failures (slot, until_ms, body) VALUES ($1, $2, $3) \
         ON CONFLICT (slot) DO UPDATE SET until_ms = excluded.until_ms, body = excluded.body",
        values![slot_text(&negative.slot), negative.until.as_millis(), body(negative)],
    )
    .await?;
    Ok(())
}

pub(super) async fn forget_negative(on: &mut Session, slot: &Slot) -> Result<(), StoreError> {
    on.execute("DELETE FROM image_build_failures WHERE slot = $1", values![slot_text(slot)]).await?;
    Ok(())
}

pub(super) async fn prune_negatives(on: &mut Session, before: Timestamp) -> Result<u64, StoreError> {
    on.execute("DELETE FROM image_build_failures WHERE until_ms < $1", values![before.as_millis()]).await
}
