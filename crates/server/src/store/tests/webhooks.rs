//! Rows of webhooks, and the log that they are told from.

use std::time::Duration;

use sandglass_sandbox::WebhookId;
use sandglass_webhooks::{
    Claim as Lease, Delivery, DeliveryState, Fenced, Health, Owner, Selection, SigningSecret, Status,
    Webhook, WebhookStore,
};

use super::moving::place;
use super::*;
use crate::store::migrate::migrate;

fn webhook(created: i64) -> Webhook {
    Webhook {
        id: WebhookId::random(),
        version: 1,
        owner: Owner::default(),
        url: "https://example.org/".into(),
        description: None,
        selection: Selection::default(),
        secret: SigningSecret::random(),
        replaced: None,
        status: Status::Enabled,
        created_at: at(created),
        updated_at: at(created),
    }
}

fn delivery(seq: u64) -> Delivery {
    Delivery::new(seq, format!("m{seq}"), "sandbox:a".into(), "sandbox.created".into(), "{}".into(), at(1))
}

fn lease(owner: &str, now: i64, until: i64) -> Lease<'_> {
    Lease { owner, now: at(now), until: at(until) }
}

on_both! {
    async fn webhooks_are_kept_newest_first_and_changed_by_version(fixture) {
        let store = &fixture.store;
        let (old, new) = (webhook(1), webhook(2));
        store.insert_webhook(&old, 7).await.unwrap();
        store.insert_webhook(&new, 7).await.unwrap();
        let ids: Vec<_> = store.webhooks().await.unwrap().into_iter().map(|(row, _)| row.id).collect();
        assert_eq!(ids, [new.id, old.id]);
        let changed = Webhook { version: 2, url: "https://other.example/".into(), ..old.clone() };
        assert_eq!(store.replace_webhook(1, &changed, None).await.unwrap(), Fenced::Written);
        assert_eq!(store.replace_webhook(1, &changed, None).await.unwrap(), Fenced::Lost);
        assert_eq!(store.webhook(old.id).await.unwrap(), Some((changed, Health::default())));
        store.delete_webhook(old.id).await.unwrap();
        store.delete_webhook(old.id).await.unwrap();
        assert_eq!(store.webhook(old.id).await.unwrap(), None);
    }

    async fn one_server_at_a_time_has_the_lease_and_writes(fixture) {
        let store = &fixture.store;
        let row = webhook(1);
        store.insert_webhook(&row, 7).await.unwrap();
        assert_eq!(store.claim(row.id, lease("a", 0, 100)).await.unwrap(), Some(7));
        assert_eq!(store.claim(row.id, lease("b", 99, 200)).await.unwrap(), None);
        assert_eq!(store.claim(row.id, lease("a", 99, 150)).await.unwrap(), Some(7), "its own");
        let rows = [delivery(8), delivery(9)];
        let put = |owner: &'static str, version, moved| store.enqueue((row.id, version), owner, moved, &rows);
        assert_eq!(put("b", 1, (7, 9)).await.unwrap(), Fenced::Lost);
        assert_eq!(put("a", 2, (7, 9)).await.unwrap(), Fenced::Lost, "it was changed");
        assert_eq!(put("a", 1, (6, 9)).await.unwrap(), Fenced::Lost, "somebody moved on");
        assert!(store.pending(row.id).await.unwrap().is_empty());
        assert_eq!(put("a", 1, (7, 9)).await.unwrap(), Fenced::Written);
        assert_eq!(store.pending(row.id).await.unwrap(), rows);
        // The lease ran out, and another server took it.
        assert_eq!(store.claim(row.id, lease("b", 150, 300)).await.unwrap(), Some(9));
        let health = Health::default().after(true, at(160));
        let mut sent = delivery(8);
        sent.finish(DeliveryState::Delivered, at(160));
        assert_eq!(store.record(row.id, "a", &sent, &health).await.unwrap(), Fenced::Lost);
        assert_eq!(store.record(row.id, "b", &sent, &health).await.unwrap(), Fenced::Written);
        assert_eq!(store.record(row.id, "b", &sent, &health).await.unwrap(), Fenced::Lost, "it ended");
        assert_eq!(store.webhook(row.id).await.unwrap().unwrap().1, health);
        assert_eq!(store.pending(row.id).await.unwrap(), [delivery(9)]);
        store.release(row.id, "a").await.unwrap();
        assert_eq!(store.claim(row.id, lease("c", 200, 400)).await.unwrap(), None);
        store.release(row.id, "b").await.unwrap();
        assert_eq!(store.claim(row.id, lease("c", 200, 400)).await.unwrap(), Some(9));
    }

    async fn what_ended_is_listed_and_forgotten(fixture) {
        let store = &fixture.store;
        let row = webhook(1);
        store.insert_webhook(&row, 0).await.unwrap();
        store.claim(row.id, lease("a", 0, 100)).await.unwrap();
        let rows: Vec<_> = (1..=5).map(delivery).collect();
        store.enqueue((row.id, 1), "a", (0, 5), &rows).await.unwrap();
        for seq in 1..=3 {
            let mut sent = delivery(seq);
            sent.finish(DeliveryState::Delivered, at(10 * i64::try_from(seq).unwrap()));
            store.record(row.id, "a", &sent, &Health::default()).await.unwrap();
        }
        assert_eq!(store.abandon(row.id, at(50)).await.unwrap(), 2);
        let seqs = async |state: Option<&str>| {
            let found = store.deliveries(row.id, state, 10).await.unwrap();
            found.into_iter().map(|d| d.seq).collect::<Vec<_>>()
        };
        assert_eq!(seqs(None).await, [5, 4, 3, 2, 1]);
        assert_eq!(seqs(Some("Dead")).await, [5, 4]);
        assert_eq!(store.prune_deliveries(at(20), 100).await.unwrap(), 1);
        assert_eq!(store.prune_deliveries(at(0), 2).await.unwrap(), 2);
        assert_eq!(seqs(None).await, [5, 4]);
        let again = Webhook { version: 2, ..row.clone() };
        assert_eq!(store.replace_webhook(1, &again, Some(77)).await.unwrap(), Fenced::Written);
        assert_eq!(store.claim(row.id, lease("a", 60, 100)).await.unwrap(), Some(77));
    }

    async fn the_log_is_read_in_order_and_only_as_far_as_it_is_complete(fixture) {
        let store = &fixture.store;
        assert_eq!(store.settled().await.unwrap(), 0);
        let (a, b) = (SandboxId::random(), SandboxId::random());
        for id in [a, b, a] {
            store.append(id, &[event("x")]).await.unwrap();
        }
        let settled = store.settled().await.unwrap();
        let all = store.logged(0, settled, 10).await.unwrap();
        let subjects: Vec<_> = all.iter().map(|line| line.subject.clone()).collect();
        assert_eq!(subjects, [a.to_string(), b.to_string(), a.to_string()]);
        assert_eq!(all[2].seq, settled);
        assert_eq!(store.logged(all[0].seq, all[1].seq, 10).await.unwrap(), all[1..2]);
        // Everything is old, and numbers still go on.
        store.prune(at(1_000)).await.unwrap();
        assert_eq!(store.settled().await.unwrap(), 0);
        store.append(b, &[event("x")]).await.unwrap();
        assert!(store.settled().await.unwrap() > settled);
    }

    async fn a_line_that_is_not_committed_holds_the_end_of_the_log_back(fixture) {
        let store = &fixture.store;
        let (a, b) = (SandboxId::random(), SandboxId::random());
        let mut open = store.database.begin().await.unwrap();
        crate::store::events::append(&mut open, a, &[event("x")]).await.unwrap();
        let asked = tokio::time::timeout(Duration::from_millis(200), store.settled()).await;
        // Either nobody can have written behind it (SQLite), or it is waited for.
        assert!(asked.is_err() || asked.unwrap().is_ok_and(|settled| settled == 0));
        open.commit().await.unwrap();
        store.append(b, &[event("x")]).await.unwrap();
        let settled = store.settled().await.unwrap();
        assert_eq!(store.logged(0, settled, 10).await.unwrap().len(), 2);
    }

    async fn what_ended_is_found_with_what_was_kept_of_it(fixture) {
        let store = &fixture.store;
        let (whole, poor, living) = (SandboxId::random(), SandboxId::random(), SandboxId::random());
        let line = |ms, kind: &str, message: &str| EventRecord { at: at(ms), kind: kind.into(), message: message.into() };
        let kept = [line(1, "accepted", ""), line(1, "owner", "t"), line(2, "record", "one"), line(5, "record", "two"), line(9, "removed", "user_delete")];
        store.append(whole, &kept).await.unwrap();
        store.append(poor, &[line(1, "accepted", ""), line(9, "removed", "x")]).await.unwrap();
        store.append(living, &[line(1, "accepted", ""), line(1, "record", "r")]).await.unwrap();
        let ended = store.ended(at(9), None).await.unwrap();
        assert_eq!(ended.len(), 1);
        assert_eq!((ended[0].sandbox_id, ended[0].at, ended[0].reason.as_str()), (whole, at(9), "user_delete"));
        assert_eq!((ended[0].owner.as_deref(), &ended[0].records), (Some("t"), &vec!["one".to_owned(), "two".to_owned()]));
        assert_eq!(store.ended(at(9), Some(whole)).await.unwrap(), ended);
        assert!(store.ended(at(9), Some(living)).await.unwrap().is_empty());
        assert!(store.ended(at(10), None).await.unwrap().is_empty());
        assert_eq!(store.kept_of(whole).await.unwrap().len(), 3);
    }
}

#[tokio::test]
async fn webhooks_and_their_deliveries_are_moved_once() {
    let (first, second) = (Fixture::sqlite().await, Fixture::sqlite().await);
    let row = webhook(1);
    first.store.insert_webhook(&row, 7).await.unwrap();
    first.store.claim(row.id, lease("a", 0, 100)).await.unwrap();
    first.store.enqueue((row.id, 1), "a", (7, 8), &[delivery(8)]).await.unwrap();
    let (from, to) = (place(&first.config), place(&second.config));
    first.store.shut().await;
    second.store.shut().await;
    for migrated in [1, 0] {
        let moved = migrate(&from, &to, false).await.unwrap();
        let totals: Vec<_> = moved[11..13].iter().map(|m| (m.table, m.total, m.migrated)).collect();
        assert_eq!(totals, [("webhooks", 1, migrated), ("webhook_deliveries", 1, migrated)]);
    }
    let store = second.another().await;
    assert_eq!(store.webhook(row.id).await.unwrap(), Some((row.clone(), Health::default())));
    assert_eq!(store.claim(row.id, lease("b", 1, 100)).await.unwrap(), Some(8), "no lease is moved");
    assert_eq!(store.pending(row.id).await.unwrap(), [delivery(8)]);
    store.shut().await;
}

/// What follows a place in the log: whose line it is, and its number.
async fn untold(store: &SqlStore, place: u64) -> Vec<(String, u64)> {
    let settled = store.settled().await.unwrap();
    let lines = store.logged(place, settled, 100).await.unwrap();
    lines.into_iter().map(|line| (line.subject, line.seq)).collect()
}

/// The source has told two of three lines, and has a message under way; the target has history and webhooks of its own.
async fn told_once(source: Fixture, target: Fixture) {
    let (ours, theirs) = (SandboxId::random(), SandboxId::random());
    source.store.append(ours, &vec![event("x"); 3]).await.unwrap();
    let (moved, caught_up, behind) = (webhook(1), webhook(2), webhook(3));
    source.store.insert_webhook(&moved, 1).await.unwrap();
    source.store.claim(moved.id, lease("a", 0, 100)).await.unwrap();
    source.store.enqueue((moved.id, 1), "a", (1, 2), &[delivery(2)]).await.unwrap();
    target.store.append(theirs, &vec![event("x"); 5]).await.unwrap();
    target.store.insert_webhook(&caught_up, 5).await.unwrap();
    target.store.insert_webhook(&behind, 4).await.unwrap();
    source.store.shut().await;
    target.store.shut().await;
    for _ in 0..2 {
        migrate(&place(&source.config), &place(&target.config), false).await.unwrap();
    }
    let store = target.another().await;
    let of = async |row: &Webhook| store.claim(row.id, lease("b", 200, 300)).await.unwrap().unwrap();
    assert_eq!(untold(&store, of(&moved).await).await, [(ours.to_string(), 8)], "the third line");
    assert_eq!(store.pending(moved.id).await.unwrap(), [delivery(2)], "under the name that receivers know");
    assert_eq!(untold(&store, of(&caught_up).await).await, []);
    assert_eq!(of(&behind).await, 4, "what is its own is still to be told");
    store.append(ours, &[event("x")]).await.unwrap();
    for row in [&moved, &caught_up, &behind] {
        let last = untold(&store, of(row).await).await.pop();
        assert_eq!(last, Some((ours.to_string(), 9)), "news is told by all");
    }
    store.shut().await;
    target.end().await;
    source.end().await;
}

#[tokio::test]
async fn a_move_tells_nothing_again() {
    told_once(Fixture::sqlite().await, Fixture::sqlite().await).await;
    let (Some(one), Some(two)) = (Fixture::postgres().await, Fixture::postgres().await) else { return };
    told_once(Fixture::sqlite().await, one).await;
    told_once(two, Fixture::sqlite().await).await;
}

/// A webhook stands behind lines that are forgotten; their numbers must not be given again, or what gets them is never told.
async fn numbers_go_on(source: Fixture, target: Fixture) {
    let (id, row) = (SandboxId::random(), webhook(1));
    source.store.append(id, &vec![event("x"); 4]).await.unwrap();
    source.store.insert_webhook(&row, 4).await.unwrap();
    source.store.prune(at(1_000_000)).await.unwrap();
    source.store.shut().await;
    target.store.shut().await;
    migrate(&place(&source.config), &place(&target.config), false).await.unwrap();
    let store = target.another().await;
    store.append(id, &[event("x")]).await.unwrap();
    let read_to = store.claim(row.id, lease("b", 0, 100)).await.unwrap().unwrap();
    assert_eq!(untold(&store, read_to).await, [(id.to_string(), 5)]);
    store.shut().await;
    target.end().await;
    source.end().await;
}

#[tokio::test]
async fn what_happens_after_a_move_is_told() {
    numbers_go_on(Fixture::sqlite().await, Fixture::sqlite().await).await;
    let (Some(one), Some(two)) = (Fixture::postgres().await, Fixture::postgres().await) else { return };
    numbers_go_on(Fixture::sqlite().await, one).await;
    numbers_go_on(two, Fixture::sqlite().await).await;
}
