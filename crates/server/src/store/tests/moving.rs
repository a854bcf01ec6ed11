//! Moves between stores.

use std::path::Path;

use sandglass_sandbox::{
    breaker::{Breaker, Limits},
    policy::Usage,
    ports::store::AgentRecord,
};

use super::*;
use crate::store::migrate::{MigrateError, Moved, Place, migrate};

pub(super) fn place(config: &StoreConfig) -> Place {
    match config.kind {
        StoreKind::Sqlite => Place::Sqlite(config.path.clone()),
        StoreKind::Postgresql => Place::Postgres(config.postgresql.clone()),
    }
}

/// A store with something in every table, and what it says.
async fn fill(store: &SqlStore) -> (SandboxId, SnapshotRecord) {
    let id = SandboxId::random();
    let wanted = intent(id, 3, Operation::Pause);
    let record = IdempotencyRecord { fingerprint: "f".into(), sandbox_id: id };
    store.insert_create(&wanted, Some(("key", &record))).await.unwrap();
    store.append(SandboxId::random(), &[event("other")]).await.unwrap();
    store.append(id, &vec![event("line"); 1_100]).await.unwrap();
    let mut record = snapshot(1_500);
    record.namespace = Some("tenant".into());
    record.restore = Some(RestoreConfig { backend: "docker".into(), image: "i".into() });
    store.insert_snapshot(&record).await.unwrap();
    store.save_agent(&agent(id), &[]).await.unwrap();
    store.save_usage(id, &usage()).await.unwrap();
    for expected in [None, Some(1)] {
        assert_eq!(
            store.save_breaker("kind", expected, &breaker(id), at(9)).await.unwrap(),
            Advance::Written
        );
    }
    (id, record)
}

fn agent(id: SandboxId) -> AgentRecord {
    AgentRecord { sandbox_id: id, body: serde_json::json!({"facts": {"link": "attached"}, "lines": 7}) }
}

fn usage() -> Usage {
    let mut usage = Usage::begun(at(4));
    usage.lease(at(9));
    usage
}

fn breaker(id: SandboxId) -> Breaker {
    let mut breaker = Breaker::default();
    breaker.failed(id, at(1), &Limits::default());
    breaker
}

/// The first tables; those of image builds have a test of their own.
fn counts(moved: &[Moved]) -> Vec<(u64, u64, u64)> {
    moved[..4].iter().map(|m| (m.total, m.migrated, m.skipped)).collect()
}

async fn round(first: StoreConfig, second: StoreConfig) {
    let store = SqlStore::open(&first).await.unwrap();
    let (id, record) = fill(&store).await;
    let history = store.history_after(id, 0, 2_000).await.unwrap();
    let planned = migrate(&place(&first), &place(&second), true).await.unwrap();
    assert_eq!(counts(&planned), [(1, 1, 0), (1_101, 1_101, 0), (1, 1, 0), (1, 1, 0)]);
    let moved = migrate(&place(&first), &place(&second), false).await.unwrap();
    assert_eq!(moved, planned);
    let again = migrate(&place(&first), &place(&second), true).await.unwrap();
    assert_eq!(counts(&again), [(1, 0, 1), (1_101, 0, 1_101), (1, 0, 1), (1, 0, 1)]);
    assert_eq!(migrate(&place(&first), &place(&second), false).await.unwrap(), again);
    let target = SqlStore::open(&second).await.unwrap();
    assert_eq!(target.open_intents().await.unwrap(), store.open_intents().await.unwrap());
    assert_eq!(target.idempotency("key").await.unwrap(), store.idempotency("key").await.unwrap());
    assert_eq!(target.snapshot(record.id).await.unwrap(), Some(record));
    assert_eq!(target.agents().await.unwrap(), [agent(id)]);
    assert_eq!(target.usages().await.unwrap(), [(id, usage())]);
    let kept = target.breaker("kind").await.unwrap();
    assert_eq!(kept, store.breaker("kind").await.unwrap());
    assert_eq!(kept.unwrap().version, 2, "whoever changes it next compares with this");
    assert_eq!(target.history_after(id, 0, 2_000).await.unwrap(), history, "numbers included");
    target.append(id, &[event("next")]).await.unwrap();
    let last = history.last().unwrap().seq;
    assert_eq!(target.history_after(id, last, 10).await.unwrap().len(), 1);
    let busy = migrate(&place(&first), &place(&second), false).await.unwrap_err();
    assert!(matches!(busy, MigrateError::InUse), "{busy}");
    target.shut().await;
    // History that comes in later lies beyond what is there.
    let late = SandboxId::random();
    store.append(late, &[event("late")]).await.unwrap();
    let moved = migrate(&place(&first), &place(&second), false).await.unwrap();
    assert_eq!(counts(&moved)[1], (1_102, 1, 1_101));
    let target = SqlStore::open(&second).await.unwrap();
    assert!(target.history_after(late, last, 10).await.unwrap().len() == 1);
    target.append(late, &[event("later")]).await.unwrap();
    assert!(target.history_after(late, 0, 10).await.unwrap().is_sorted_by(|a, b| a.seq < b.seq));
    target.shut().await;
    store.shut().await;
}

#[tokio::test]
async fn from_file_to_file() {
    let dir = tempfile::tempdir().unwrap();
    round(file(dir.path().join("a.db")), file(dir.path().join("b.db"))).await;
}

#[tokio::test]
async fn between_the_engines() {
    let dir = tempfile::tempdir().unwrap();
    let (Some(one), Some(two)) = (database().await, database().await) else { return };
    round(file(dir.path().join("a.db")), one.clone()).await;
    round(two.clone(), file(dir.path().join("b.db"))).await;
    drop_database(&one).await;
    drop_database(&two).await;
}

fn listing(dir: &Path) -> Vec<(String, Vec<u8>)> {
    let mut files: Vec<_> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap())
        .map(|entry| (entry.file_name().into_string().unwrap(), std::fs::read(entry.path()).unwrap()))
        .collect();
    files.sort();
    files
}

#[tokio::test]
async fn the_source_is_not_touched_and_a_rehearsal_touches_nothing() {
    let (dir, out) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let source = file(dir.path().join("a.db"));
    let store = SqlStore::open(&source).await.unwrap();
    fill(&store).await;
    store.shut().await;
    let before = listing(dir.path());
    let target = Place::Sqlite(out.path().join("deep/b.db"));
    migrate(&place(&source), &target, true).await.unwrap();
    assert_eq!(listing(out.path()), []);
    migrate(&place(&source), &target, false).await.unwrap();
    assert!(listing(dir.path()) == before, "the source is as it was");
}

#[tokio::test]
async fn what_is_no_store_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let target = Place::Sqlite(dir.path().join("b.db"));
    let absent = migrate(&Place::Sqlite(dir.path().join("a.db")), &target, false).await.unwrap_err();
    assert!(matches!(absent, MigrateError::Absent(_)), "{absent}");
    let empty = dir.path().join("empty.db");
    std::fs::write(&empty, "").unwrap();
    let foreign = migrate(&Place::Sqlite(empty.clone()), &target, false).await.unwrap_err();
    assert!(matches!(foreign, MigrateError::Foreign), "{foreign}");
    std::fs::write(&empty, "no database at all, but long enough to be looked at as one".repeat(40)).unwrap();
    let bad = migrate(&Place::Sqlite(empty), &target, false).await.unwrap_err();
    assert!(matches!(bad, MigrateError::Source(_)), "{bad}");
    let same = migrate(&target, &target, false).await.unwrap_err();
    assert!(matches!(same, MigrateError::Same), "{same}");
    assert!(!dir.path().join("b.db").exists());
}

#[test]
fn places() {
    let read = |text| Place::parse(text, Some("postgres://from-env/db"));
    assert_eq!(read("sqlite:/var/s.db").unwrap(), Place::Sqlite("/var/s.db".into()));
    assert_eq!(read("sqlite:///var/s.db").unwrap(), Place::Sqlite("/var/s.db".into()));
    assert_eq!(read("sqlite:s.db").unwrap(), Place::Sqlite("s.db".into()));
    assert_eq!(read("postgres").unwrap(), read("postgres://from-env/db").unwrap());
    assert!(matches!(Place::parse("postgres", None), Err(MigrateError::NoDsn)));
    for bad in ["", "sqlite:", "/var/s.db", "mysql://h/db"] {
        assert!(matches!(read(bad), Err(MigrateError::Place)), "{bad}");
    }
}
