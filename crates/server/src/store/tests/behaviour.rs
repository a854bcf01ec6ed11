//! What the port promises.

use super::*;

on_both! {
    async fn a_lost_race_is_a_value_and_writes_nothing(fixture) {
        let store = &fixture.store;
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

    async fn an_idempotency_key_is_claimed_once(fixture) {
        let store = &fixture.store;
        let (first, second) = (SandboxId::random(), SandboxId::random());
        let record = |id| IdempotencyRecord { fingerprint: "f".into(), sandbox_id: id };
        let claim = |id| async move {
            store.insert_create(&intent(id, 1, Operation::Pause), Some(("k", &record(id)))).await
        };
        assert_eq!(claim(first).await.unwrap(), Claim::Claimed);
        assert_eq!(claim(second).await.unwrap(), Claim::Taken(record(first)));
        assert_eq!(store.open_intents().await.unwrap().len(), 1, "the second request left nothing");
        assert_eq!(store.idempotency("k").await.unwrap(), Some(record(first)));
        store.prune(at(6)).await.unwrap();
        assert_eq!(store.idempotency("k").await.unwrap(), None);
        assert_eq!(claim(second).await.unwrap(), Claim::Claimed);
        store.release_key(second).await.unwrap();
        assert_eq!(store.idempotency("k").await.unwrap(), None);
    }

    async fn use_and_breakers_are_kept_and_forgotten(fixture) {
        use sandglass_sandbox::{breaker::{Breaker, Limits}, policy::Usage};
        let store = &fixture.store;
        let id = SandboxId::random();
        let mut usage = Usage::begun(at(1));
        store.save_usage(id, &usage).await.unwrap();
        usage.lease(at(9));
        store.save_usage(id, &usage).await.unwrap();
        assert_eq!(store.usages().await.unwrap(), [(id, usage)]);
        store.forget_usage(id).await.unwrap();
        store.forget_usage(id).await.unwrap();
        assert!(store.usages().await.unwrap().is_empty());
        let mut breaker = Breaker::default();
        breaker.failed(id, at(1), &Limits::default());
        let save = |expected, breaker: Breaker, when| async move {
            store.save_breaker("k", expected, &breaker, at(when)).await.unwrap()
        };
        assert_eq!(save(None, breaker.clone(), 5).await, Advance::Written);
        assert_eq!(save(None, breaker.clone(), 5).await, Advance::Lost);
        assert_eq!(save(Some(7), breaker.clone(), 5).await, Advance::Lost);
        assert_eq!(store.breaker("k").await.unwrap().unwrap().breaker, breaker);
        assert_eq!(save(Some(1), Breaker::default(), 6).await, Advance::Written);
        let kept = store.breaker("k").await.unwrap().unwrap();
        assert!(kept.version == 2 && kept.breaker.is_empty());
        store.prune(at(7)).await.unwrap();
        assert_eq!(store.breaker("k").await.unwrap(), None);
    }

    async fn an_intent_without_a_key_is_inserted_once(fixture) {
        let wanted = intent(SandboxId::random(), 1, Operation::Resume);
        assert_eq!(fixture.store.insert_create(&wanted, None).await.unwrap(), Claim::Claimed);
        assert!(fixture.store.insert_create(&wanted, None).await.is_err());
        assert_eq!(fixture.store.open_intents().await.unwrap(), [wanted]);
    }

    async fn everything_survives_reopening(fixture) {
        let wanted = intent(SandboxId::random(), 1, Operation::Resume);
        fixture.store.advance(None, &wanted, Some(&event("a"))).await.unwrap();
        let kept = snapshot(1_000);
        fixture.store.insert_snapshot(&kept).await.unwrap();
        fixture.store.shut().await;
        assert!(fixture.store.open_intents().await.is_err(), "nothing may be asked afterwards");
        let again = fixture.another().await;
        assert_eq!(again.open_intents().await.unwrap(), std::slice::from_ref(&wanted));
        assert_eq!(again.snapshot(kept.id).await.unwrap(), Some(kept));
        assert_eq!(again.history(wanted.sandbox_id, 10).await.unwrap(), [event("a")]);
        again.shut().await;
    }

    async fn of_many_at_once_exactly_one_wins(fixture) {
        let other = fixture.another().await;
        for round in 0..5 {
            let id = SandboxId::random();
            let kept = SnapshotRecord { state: SnapshotState::Creating, ..snapshot(round) };
            fixture.store.insert_snapshot(&kept).await.unwrap();
            let mut running = tokio::task::JoinSet::new();
            for racer in 0..8_u64 {
                let store = if racer % 2 == 0 { fixture.store.clone() } else { other.clone() };
                let (key, mut kept) = (format!("key {round}"), kept.clone());
                running.spawn(async move {
                    let created = SandboxId::random();
                    let record = IdempotencyRecord { fingerprint: racer.to_string(), sandbox_id: created };
                    let pause = intent(id, racer + 1, Operation::Pause);
                    kept.state = if racer % 3 == 0 { SnapshotState::Ready } else { SnapshotState::Failed };
                    let create = intent(created, 1, Operation::Pause);
                    let claimed = store.insert_create(&create, Some((&key, &record))).await.unwrap();
                    let begun = store.advance(None, &pause, Some(&event("begun"))).await.unwrap();
                    let ended = store.advance_snapshot(SnapshotState::Creating, &kept).await.unwrap();
                    (claimed == Claim::Claimed, begun == Advance::Written, ended == Advance::Written)
                });
            }
            let won = running.join_all().await;
            assert_eq!(won.iter().filter(|won| won.0).count(), 1, "claims of a key");
            assert_eq!(won.iter().filter(|won| won.1).count(), 1, "beginnings of an operation");
            assert_eq!(won.iter().filter(|won| won.2).count(), 1, "endings of a snapshot");
            assert_eq!(fixture.store.history(id, 10).await.unwrap().len(), 1);
        }
        other.shut().await;
    }

    async fn history_is_numbered_for_good(fixture) {
        let (store, id, other) = (&fixture.store, SandboxId::random(), SandboxId::random());
        assert_eq!(store.history_bounds(id).await.unwrap(), None);
        store.append(id, &[]).await.unwrap();
        store.append(id, &[event("a"), event("b")]).await.unwrap();
        store.append(other, &[event("x")]).await.unwrap();
        store.append(id, &[event("c")]).await.unwrap();
        let all = store.history_after(id, 0, 10).await.unwrap();
        assert_eq!(all.iter().map(|e| e.event.kind.as_str()).collect::<Vec<_>>(), ["a", "b", "c"]);
        assert!(all[0].seq > 0 && all.is_sorted_by(|a, b| a.seq < b.seq));
        assert_eq!(store.history_after(id, all[0].seq, 1).await.unwrap(), all[1..2]);
        assert_eq!(store.history_after(id, u64::MAX, 1).await.unwrap(), []);
        let bounds = HistoryBounds { first: all[0].seq, last: all[2].seq };
        assert_eq!(store.history_bounds(id).await.unwrap(), Some(bounds));
        let newest: Vec<_> = store.history(id, 2).await.unwrap().into_iter().map(|e| e.kind).collect();
        assert_eq!(newest, ["b", "c"]);
        assert_eq!(store.prune(at(6)).await.unwrap(), 4);
        assert_eq!(store.history_bounds(id).await.unwrap(), None);
        store.shut().await;
        let again = fixture.another().await;
        again.append(id, &[event("d")]).await.unwrap();
        let later = again.history_after(id, all[2].seq, 10).await.unwrap();
        assert_eq!(later.len(), 1, "a number is not given again after the lines are gone");
        again.shut().await;
    }

    async fn a_reader_that_goes_on_after_the_last_number_misses_nothing(fixture) {
        const WRITERS: usize = 6;
        const LINES: usize = 25;
        let (id, other) = (SandboxId::random(), fixture.another().await);
        let mut writing = tokio::task::JoinSet::new();
        for writer in 0..WRITERS {
            let store = if writer % 2 == 0 { fixture.store.clone() } else { other.clone() };
            writing.spawn(async move {
                for line in 0..LINES {
                    let lines = [event(&format!("{writer}.{line}")), event("second")];
                    store.append(id, &lines).await.unwrap();
                }
            });
        }
        let (mut last, mut read) = (0, 0);
        while read < 2 * WRITERS * LINES {
            for line in fixture.store.history_after(id, last, 7).await.unwrap() {
                assert!(line.seq > last);
                (last, read) = (line.seq, read + 1);
            }
            tokio::task::yield_now().await;
        }
        writing.join_all().await;
        assert_eq!(fixture.store.history_after(id, last, 7).await.unwrap(), []);
        other.shut().await;
    }

    async fn a_snapshot_goes_through_its_states(fixture) {
        let store = &fixture.store;
        let mut record = snapshot(1_234);
        record.name = Some("first".into());
        store.insert_snapshot(&record).await.unwrap();
        assert!(matches!(store.insert_snapshot(&record).await, Err(StoreError::Unavailable(_))));
        assert_eq!(store.snapshot(record.id).await.unwrap(), Some(record.clone()));
        assert_eq!(store.snapshots_in(SnapshotState::Creating).await.unwrap(), [record.clone()]);
        record.state = SnapshotState::Ready;
        record.restore = Some(RestoreConfig { backend: "docker".into(), image: "opensandbox-snapshots:1".into() });
        record.reason = "snapshot_runtime_ready".into();
        record.message = None;
        record.last_transition_at = at(2_001);
        assert_eq!(store.advance_snapshot(SnapshotState::Deleting, &record).await.unwrap(), Advance::Lost);
        assert_eq!(store.advance_snapshot(SnapshotState::Creating, &record).await.unwrap(), Advance::Written);
        assert_eq!(store.snapshot(record.id).await.unwrap(), Some(record.clone()));
        assert_eq!(store.snapshots_in(SnapshotState::Creating).await.unwrap(), []);
        assert_eq!(store.delete_snapshot(record.id, SnapshotState::Deleting).await.unwrap(), Advance::Lost);
        assert_eq!(store.delete_snapshot(record.id, SnapshotState::Ready).await.unwrap(), Advance::Written);
        assert_eq!(store.snapshot(record.id).await.unwrap(), None);
        assert_eq!(store.delete_snapshot(record.id, SnapshotState::Ready).await.unwrap(), Advance::Lost);
        assert_eq!(store.advance_snapshot(SnapshotState::Ready, &record).await.unwrap(), Advance::Lost);
    }

    async fn snapshots_are_listed_by_filter_and_page(fixture) {
        let store = &fixture.store;
        let mut records = Vec::new();
        for number in 0..10_i64 {
            let mut record = snapshot([1_000, 999, 5_500][(number % 3) as usize]);
            record.name = (number % 2 == 0).then(|| "even".into());
            record.namespace = (number >= 8).then(|| "tenant".into());
            record.state = SnapshotState::ALL[(number % 4) as usize];
            store.insert_snapshot(&record).await.unwrap();
            records.push(record);
        }
        records.sort_by_key(|r| std::cmp::Reverse((r.created_at, r.id.to_string())));
        let check = async |filter: SnapshotFilter| {
            let wanted: Vec<_> = records
                .iter()
                .filter(|r| {
                    r.namespace == filter.namespace
                        && filter.source.is_none_or(|s| s == r.source)
                        && (filter.name.is_none() || filter.name == r.name)
                        && (filter.states.is_empty() || filter.states.contains(&r.state))
                })
                .cloned()
                .collect();
            let (all, total) = store.snapshots(&filter, 0, 100).await.unwrap();
            assert_eq!((&all, total), (&wanted, wanted.len() as u64), "{filter:?}");
            let (page, total) = store.snapshots(&filter, 1, 2).await.unwrap();
            assert_eq!((page.len(), total), (wanted.len().saturating_sub(1).min(2), wanted.len() as u64));
            assert!(page.iter().zip(wanted.iter().skip(1)).all(|(a, b)| a == b));
            let (none, total) = store.snapshots(&filter, u64::MAX, u64::MAX).await.unwrap();
            assert_eq!((none.len(), total), (0, wanted.len() as u64));
        };
        let all = SnapshotFilter::default;
        check(all()).await;
        check(SnapshotFilter { namespace: Some("tenant".into()), ..all() }).await;
        check(SnapshotFilter { namespace: Some("nobody".into()), ..all() }).await;
        check(SnapshotFilter { name: Some("even".into()), ..all() }).await;
        check(SnapshotFilter { name: Some("odd".into()), ..all() }).await;
        check(SnapshotFilter { source: Some(records[4].source), ..all() }).await;
        check(SnapshotFilter { states: vec![SnapshotState::Ready, SnapshotState::Failed], ..all() }).await;
        let both = SnapshotFilter { states: vec![SnapshotState::Creating], name: Some("even".into()), ..all() };
        check(both).await;
    }

    async fn text_of_every_kind_is_kept(fixture) {
        let (store, id) = (&fixture.store, SandboxId::random());
        let huge = "é'\"\\$1;--".repeat(400_000);
        let nul = EventRecord { at: at(5), kind: "a\0b".into(), message: "x\0\0y".into() };
        let long = EventRecord { at: at(5), kind: "\u{1F980}\r\n\t\u{7f}".into(), message: huge.clone() };
        store.append(id, &[nul, long.clone()]).await.unwrap();
        let kept = store.history(id, 10).await.unwrap();
        assert_eq!((kept[0].kind.as_str(), kept[0].message.as_str()), ("a\u{FFFD}b", "x\u{FFFD}\u{FFFD}y"));
        assert_eq!(kept[1], long);
        let mut record = snapshot(7);
        record.name = Some("n\0".into());
        record.description = Some(huge.clone());
        record.message = Some(format!("\0{huge}"));
        store.insert_snapshot(&record).await.unwrap();
        let filter = SnapshotFilter { name: Some("n\0".into()), ..SnapshotFilter::default() };
        let (found, _) = store.snapshots(&filter, 0, 10).await.unwrap();
        assert_eq!(found[0].description, record.description);
        let mut name = snapshot(8);
        name.name = Some(huge.clone());
        store.insert_snapshot(&name).await.unwrap();
        assert_eq!(store.snapshot(name.id).await.unwrap().unwrap().name, name.name);
        let claimed = IdempotencyRecord { fingerprint: huge.clone(), sandbox_id: id };
        let wanted = intent(id, u64::MAX, Operation::Pause);
        for key in ["", "k\0", "\u{1F980}", &huge] {
            assert_eq!(store.insert_create(&wanted, Some((key, &claimed))).await.unwrap(), Claim::Claimed);
            assert_eq!(store.idempotency(key).await.unwrap(), Some(claimed.clone()));
            assert_eq!(store.close(id, u64::MAX, &[]).await.unwrap(), Advance::Written);
        }
        let other_end = format!("{huge}.");
        assert_eq!(store.idempotency(&other_end).await.unwrap(), None);
    }

    async fn one_unreadable_row_does_not_hide_the_others(fixture) {
        let store = &fixture.store;
        let mut bad = snapshot(1);
        bad.state = SnapshotState::Ready;
        let mut good = snapshot(2);
        good.state = SnapshotState::Ready;
        store.insert_snapshot(&bad).await.unwrap();
        store.insert_snapshot(&good).await.unwrap();
        for (sql, value) in [
            ("UPDATE snapshots SET created_at = $1 WHERE id = $2", "yesterday"),
            ("UPDATE snapshots SET created_at = '2026-01-01T00:00:00', restore_config = $1 WHERE id = $2", "[]x"),
            ("UPDATE snapshots SET restore_config = '{}', source_sandbox_id = $1 WHERE id = $2", "no uuid"),
        ] {
            let mut tx = store.database.begin().await.unwrap();
            tx.execute(sql, values![value, bad.id.to_string()]).await.unwrap();
            tx.commit().await.unwrap();
            assert!(matches!(store.snapshot(bad.id).await, Err(StoreError::Corrupt(_))), "{value}");
            assert_eq!(store.snapshots_in(SnapshotState::Ready).await.unwrap(), [good.clone()], "{value}");
            let (listed, total) = store.snapshots(&SnapshotFilter::default(), 0, 10).await.unwrap();
            assert_eq!((listed, total), (vec![good.clone()], 2), "{value}");
        }
        let mut tx = store.database.begin().await.unwrap();
        let broken = "INSERT INTO intents (sandbox_id, generation, body) VALUES ('x', 1, 'y')";
        tx.execute(broken, values![]).await.unwrap();
        tx.commit().await.unwrap();
        assert!(matches!(store.open_intents().await, Err(StoreError::Corrupt(_))));
    }

    async fn a_transaction_that_is_given_up_leaves_nothing(fixture) {
        let id = SandboxId::random();
        let mut tx = fixture.store.database.begin().await.unwrap();
        crate::store::events::append(&mut tx, id, &[event("lost")]).await.unwrap();
        drop(tx);
        assert_eq!(fixture.store.history(id, 10).await.unwrap(), []);
        fixture.store.append(id, &[event("kept")]).await.unwrap();
        assert_eq!(fixture.store.history(id, 10).await.unwrap(), [event("kept")]);
    }

    async fn a_database_of_a_newer_server_is_refused(fixture) {
        let mut tx = fixture.store.database.begin().await.unwrap();
        tx.execute("UPDATE _sqlx_migrations SET version = 99 WHERE version = 2", values![]).await.unwrap();
        tx.commit().await.unwrap();
        let error = SqlStore::open(&fixture.config).await.unwrap_err();
        assert!(error.to_string().contains("99"), "{error}");
    }
}

#[tokio::test]
async fn a_file_is_private_and_its_log_is_written_ahead() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = Fixture::sqlite().await;
    for name in ["s.db", "s.db-wal", "s.db-shm"] {
        let path = fixture.config.path.with_file_name(name);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600, "{name}");
    }
    let mut reader = fixture.store.database.reader().await.unwrap();
    let (mode,): (String,) = reader.row("PRAGMA journal_mode", values![]).await.unwrap().unwrap();
    assert_eq!(mode, "wal");
    assert!(reader.execute("DELETE FROM events", values![]).await.is_err(), "readers cannot write");
}
