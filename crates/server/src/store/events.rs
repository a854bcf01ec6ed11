//! Rows of history.

use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::store::{EndedSandbox, EventRecord, HistoryBounds, SequencedEvent, StoreError},
};

use super::database::{Session, values};

type Line = (i64, i64, String, String);

/// Numbers are the database's, and in the order of commits within one sandbox.
pub(super) async fn append(
    on: &mut Session,
    id: SandboxId,
    events: &[EventRecord],
) -> Result<(), StoreError> {
    append_about(on, &id.to_string(), events).await
}

/// The same for what is no sandbox.
pub(super) async fn append_about(
    on: &mut Session,
    subject: &str,
    events: &[EventRecord],
) -> Result<(), StoreError> {
    for event in events {
        on.execute(
            "INSERT INTO events (sandbox_id, at_ms, kind, message) VALUES ($1, $2, $3, $4)",
            values![subject, event.at.as_millis(), event.kind.as_str(), event.message.as_str()],
        )
        .await?;
    }
    Ok(())
}

pub(super) async fn newest(
    on: &mut Session,
    id: SandboxId,
    limit: u32,
) -> Result<Vec<EventRecord>, StoreError> {
    let mut rows: Vec<Line> = on
        .rows(
            "SELECT seq, at_ms, kind, message FROM events WHERE sandbox_id = $1 ORDER BY seq DESC LIMIT $2",
            values![id.to_string(), i64::from(limit)],
        )
        .await?;
    rows.reverse();
    Ok(rows.into_iter().map(|row| sequenced(row).event).collect())
}

pub(super) async fn after(
    on: &mut Session,
    id: SandboxId,
    after: u64,
    limit: u32,
) -> Result<Vec<SequencedEvent>, StoreError> {
    let rows: Vec<Line> = on
        .rows(
            "SELECT seq, at_ms, kind, message FROM events WHERE sandbox_id = $1 AND seq > $2 ORDER BY seq LIMIT $3",
            values![id.to_string(), after, i64::from(limit)],
        )
        .await?;
    Ok(rows.into_iter().map(sequenced).collect())
}

pub(super) async fn bounds(on: &mut Session, id: SandboxId) -> Result<Option<HistoryBounds>, StoreError> {
    let row: Option<(Option<i64>, Option<i64>)> = on
        .row("SELECT MIN(seq), MAX(seq) FROM events WHERE sandbox_id = $1", values![id.to_string()])
        .await?;
    let (first, last) = row.unwrap_or_default();
    Ok(first.zip(last).map(|(first, last)| HistoryBounds { first: unsigned(first), last: unsigned(last) }))
}

pub(super) async fn prune(on: &mut Session, before: Timestamp) -> Result<u64, StoreError> {
    on.execute("DELETE FROM events WHERE at_ms < $1", values![before.as_millis()]).await
}

/// The newest lines of the kinds after which nothing of their sandboxes is left, with what was kept of each.
pub(super) async fn ended(
    on: &mut Session,
    since: Timestamp,
    id: Option<SandboxId>,
    limit: u32,
) -> Result<Vec<EndedSandbox>, StoreError> {
    let id = id.map(|id| id.to_string());
    let rows: Vec<(String, i64, String, String, String)> = on
        .rows(
            "SELECT e.sandbox_id, e.at_ms, e.message, k.kind, k.message FROM events e \
             JOIN events k ON k.sandbox_id = e.sandbox_id AND k.kind IN ('owner', 'record') \
             WHERE e.kind = 'removed' AND e.at_ms >= $1 AND ($2 IS NULL OR e.sandbox_id = $2) \
             ORDER BY e.at_ms DESC, e.sandbox_id, k.seq LIMIT $3",
            values![since.as_millis(), id.as_deref(), i64::from(limit)],
        )
        .await?;
    let mut ended: Vec<EndedSandbox> = Vec::new();
    for (sandbox, at, reason, kind, message) in rows {
        let Ok(sandbox) = sandbox.parse::<SandboxId>() else { continue };
        if ended.last().is_none_or(|last| last.sandbox_id != sandbox) {
            let at = Timestamp::clamped(at);
            ended.push(EndedSandbox { sandbox_id: sandbox, at, reason, owner: None, records: Vec::new() });
        }
        let Some(last) = ended.last_mut() else { continue };
        match kind.as_str() {
            "owner" => last.owner = Some(message),
            _ => last.records.push(message),
        }
    }
    ended.retain(|one| !one.records.is_empty());
    Ok(ended)
}

fn sequenced((seq, at, kind, message): Line) -> SequencedEvent {
    SequencedEvent { seq: unsigned(seq), event: EventRecord { at: Timestamp::clamped(at), kind, message } }
}

fn unsigned(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
