use sandglass_sandbox::lifecycle::intent::{Operation, RemoveReason};

use super::*;

fn at(ms: i64) -> Timestamp {
    Timestamp::clamped(ms)
}

fn intent(id: SandboxId, generation: u64, operation: Operation) -> Intent {
    Intent { sandbox_id: id, generation, operation, accepted_at: at(5), deadline: at(50) }
}

fn event(kind: &str) -> EventRecord {
    EventRecord { at: at(5), kind: kind.into(), message: String::new() }
}

async fn store() -> (tempfile::TempDir, SqliteStore) {
    let dir = tempfile::tempdir().unwrap();
    let store = SqliteStore::open(&dir.path().join("s.db")).await.unwrap();
    (dir, store)
}

#[tokio::test]
async fn a_lost_race_is_a_value_and_writes_nothing() {
    let (_dir, store) = store().await;
    let id = SandboxId::random();
    let pause = intent(id, 1, Operation::Pause);
    assert_eq!(store.advance(None, &pause, Some(&event("a"))).await.unwrap(), Advance::Written);
    assert_eq!(store.advance(None, &pause, Some(&event("b"))).await.unwrap(), Advance::Lost);
    let remove = Operation::Remove { reason: RemoveReason::Expired, not_before: None, last_error: None };
    assert_eq!(store.advance(Some(7), &intent(id, 8, remove.clone()), None).await.unwrap(), Advance::Lost);
    assert_eq!(store.advance(Some(1), &intent(id, 2, remove), None).await.unwrap(), Advance::Written);
    assert_eq!(store.close(id, 1, &[event("c")]).await.unwrap(), Advance::Lost);
    assert_eq!(store.open_intents().await.unwrap().len(), 1);
    assert_eq!(store.close(id, 2, &[event("d")]).await.unwrap(), Advance::Written);
    assert!(store.open_intents().await.unwrap().is_empty());
    let kinds: Vec<_> = store.history(id, 10).await.unwrap().into_iter().map(|e| e.kind).collect();
    assert_eq!(kinds, ["a", "d"]);
}

#[tokio::test]
async fn an_idempotency_key_is_claimed_once() {
    let (_dir, store) = store().await;
    let (first, second) = (SandboxId::random(), SandboxId::random());
    let record = |id| IdempotencyRecord { fingerprint: "f".into(), sandbox_id: id };
    let claim = |id| {
        let (store, record) = (store.clone(), record(id));
        async move { store.insert_create(&intent(id, 1, Operation::Pause), Some(("k", &record))).await }
    };
    assert_eq!(claim(first).await.unwrap(), Claim::Claimed);
    assert_eq!(claim(second).await.unwrap(), Claim::Taken(record(first)));
    assert_eq!(store.open_intents().await.unwrap().len(), 1, "the second request left nothing");
    assert_eq!(store.idempotency("k").await.unwrap(), Some(record(first)));
    store.prune(at(6)).await.unwrap();
    assert_eq!(store.idempotency("k").await.unwrap(), None);
}

#[tokio::test]
async fn intents_survive_reopening() {
    let (dir, store) = store().await;
    let wanted = intent(SandboxId::random(), 1, Operation::Resume);
    store.advance(None, &wanted, None).await.unwrap();
    store.shut().await;
    let again = SqliteStore::open(&dir.path().join("s.db")).await.unwrap();
    assert_eq!(again.open_intents().await.unwrap(), [wanted]);
}
