//! The driver over ports in memory. Waits for conditions only, within a bound.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
};

use async_trait::async_trait;
use sandglass_sandbox::{SandboxId, SystemClock, ports::store::StoreError};

use super::*;
use crate::{
    ports::{Claim, Fenced, Message, Owner, SendError, Sent, Subject, Taken},
    record::{Delivery, DeliveryState, Health, Why},
    secret::SigningSecret,
    selection::Selection,
};

struct Row {
    webhook: Webhook,
    health: Health,
    cursor: u64,
    lease: Option<(String, Timestamp)>,
    deliveries: BTreeMap<u64, Delivery>,
}

#[derive(Default)]
struct Memory {
    rows: Mutex<HashMap<WebhookId, Row>>,
    log: Mutex<Vec<Message>>,
    grown: Notify,
}

impl Memory {
    fn with<T>(&self, id: WebhookId, act: impl FnOnce(&mut Row) -> T) -> Option<T> {
        self.rows.lock().unwrap().get_mut(&id).map(act)
    }

    /// Something happens to the subjects, in this order.
    fn happen(&self, subjects: &[SandboxId]) {
        let mut log = self.log.lock().unwrap();
        for subject in subjects {
            let seq = log.len() as u64 + 1;
            log.push(Message {
                seq,
                subject: Subject::Sandbox(*subject),
                kind: "sandbox.created".into(),
                at: Timestamp::clamped(0),
                owner: Owner::default(),
                metadata: BTreeMap::new(),
                data: serde_json::Map::new(),
            });
        }
        self.grown.notify_one();
    }

    fn states(&self, id: WebhookId) -> Vec<DeliveryState> {
        self.with(id, |row| row.deliveries.values().map(|d| d.state).collect()).unwrap_or_default()
    }
}

fn owned(row: &Row, owner: &str) -> bool {
    row.lease.as_ref().is_some_and(|(by, _)| by == owner)
}

#[async_trait]
impl WebhookStore for Memory {
    async fn insert_webhook(&self, webhook: &Webhook, cursor: u64) -> Result<(), StoreError> {
        let row = Row {
            webhook: webhook.clone(),
            health: Health::default(),
            cursor,
            lease: None,
            deliveries: BTreeMap::new(),
        };
        self.rows.lock().unwrap().insert(webhook.id, row);
        Ok(())
    }

    async fn replace_webhook(
        &self,
        expected: u64,
        webhook: &Webhook,
        cursor: Option<u64>,
    ) -> Result<Fenced, StoreError> {
        let done = self.with(webhook.id, |row| {
            let same = row.webhook.version == expected;
            if same {
                row.webhook = webhook.clone();
                row.cursor = cursor.unwrap_or(row.cursor);
            }
            same
        });
        Ok(if done == Some(true) { Fenced::Written } else { Fenced::Lost })
    }

    async fn delete_webhook(&self, id: WebhookId) -> Result<(), StoreError> {
        self.rows.lock().unwrap().remove(&id);
        Ok(())
    }

    async fn webhook(&self, id: WebhookId) -> Result<Option<(Webhook, Health)>, StoreError> {
        Ok(self.with(id, |row| (row.webhook.clone(), row.health)))
    }

    async fn webhooks(&self) -> Result<Vec<(Webhook, Health)>, StoreError> {
        Ok(self.rows.lock().unwrap().values().map(|row| (row.webhook.clone(), row.health)).collect())
    }

    async fn claim(&self, id: WebhookId, claim: Claim<'_>) -> Result<Option<u64>, StoreError> {
        let cursor = self.with(id, |row| {
            let free = row.lease.as_ref().is_none_or(|(by, until)| by == claim.owner || *until <= claim.now);
            free.then(|| {
                row.lease = Some((claim.owner.into(), claim.until));
                row.cursor
            })
        });
        Ok(cursor.flatten())
    }

    async fn release(&self, id: WebhookId, owner: &str) -> Result<(), StoreError> {
        self.with(id, |row| row.lease = row.lease.take().filter(|(by, _)| by != owner));
        Ok(())
    }

    async fn enqueue(
        &self,
        (id, version): (WebhookId, u64),
        owner: &str,
        (expected, cursor): (u64, u64),
        deliveries: &[Delivery],
    ) -> Result<Fenced, StoreError> {
        let done = self.with(id, |row| {
            let mine = owned(row, owner) && row.webhook.version == version && row.cursor == expected;
            if mine {
                row.cursor = cursor;
                row.deliveries.extend(deliveries.iter().map(|d| (d.seq, d.clone())));
            }
            mine
        });
        Ok(if done == Some(true) { Fenced::Written } else { Fenced::Lost })
    }

    async fn record(
        &self,
        id: WebhookId,
        owner: &str,
        delivery: &Delivery,
        health: &Health,
    ) -> Result<Fenced, StoreError> {
        let done = self.with(id, |row| {
            let pending =
                row.deliveries.get(&delivery.seq).is_some_and(|d| d.state == DeliveryState::Pending);
            let mine = owned(row, owner) && pending;
            if mine {
                row.deliveries.insert(delivery.seq, delivery.clone());
                row.health = *health;
            }
            mine
        });
        Ok(if done == Some(true) { Fenced::Written } else { Fenced::Lost })
    }

    async fn abandon(&self, id: WebhookId, now: Timestamp) -> Result<u64, StoreError> {
        let abandoned = self.with(id, |row| {
            let pending = row.deliveries.values_mut().filter(|d| d.state == DeliveryState::Pending);
            pending.map(|d| d.finish(DeliveryState::Dead, now)).count() as u64
        });
        Ok(abandoned.unwrap_or_default())
    }

    async fn pending(&self, id: WebhookId) -> Result<Vec<Delivery>, StoreError> {
        let pending = self.with(id, |row| {
            row.deliveries.values().filter(|d| d.state == DeliveryState::Pending).cloned().collect()
        });
        Ok(pending.unwrap_or_default())
    }

    async fn deliveries(&self, _: WebhookId, _: Option<&str>, _: u32) -> Result<Vec<Delivery>, StoreError> {
        Ok(Vec::new())
    }

    async fn prune_deliveries(&self, _: Timestamp, _: u32) -> Result<u64, StoreError> {
        Ok(0)
    }
}

#[async_trait]
impl Events for Memory {
    async fn settled(&self) -> Result<u64, StoreError> {
        Ok(self.log.lock().unwrap().len() as u64)
    }

    async fn after(&self, after: u64, settled: u64, limit: u32) -> Result<Taken, StoreError> {
        let log = self.log.lock().unwrap();
        let lines = log.iter().filter(|m| m.seq > after && m.seq <= settled).take(limit as usize);
        let messages: Vec<_> = lines.cloned().collect();
        let read_to = messages.last().map_or(settled, |last| last.seq);
        Ok(Taken { messages, read_to })
    }

    async fn grown(&self) {
        self.grown.notified().await;
    }
}

/// Receivers by the path of their address.
#[derive(Default)]
struct Receivers {
    /// Ids of messages as they came, whatever was answered.
    got: Mutex<HashMap<String, Vec<String>>>,
    /// What is answered: by receiver, or by receiver and message; 200 otherwise. 0 never answers.
    answers: Mutex<HashMap<String, u16>>,
    calls: AtomicU64,
}

impl Receivers {
    fn answer(&self, to: &str, status: u16) {
        self.answers.lock().unwrap().insert(to.to_owned(), status);
    }

    fn got(&self, receiver: &str) -> Vec<u64> {
        let got = self.got.lock().unwrap();
        let ids = got.get(receiver).cloned().unwrap_or_default();
        ids.iter().map(|id| id.rsplit('_').next().unwrap().parse().unwrap()).collect()
    }
}

#[async_trait]
impl Sender for Receivers {
    async fn send(&self, request: &Request) -> Result<Sent, SendError> {
        self.calls.fetch_add(1, Ordering::SeqCst);
        let receiver = request.url.rsplit('/').next().unwrap().to_owned();
        let message = format!("{receiver}#{}", request.id.rsplit('_').next().unwrap());
        self.got.lock().unwrap().entry(receiver.clone()).or_default().push(request.id.clone());
        let status = {
            let answers = self.answers.lock().unwrap();
            answers.get(&message).or_else(|| answers.get(&receiver)).copied().unwrap_or(200)
        };
        if status == 0 {
            std::future::pending::<()>().await;
        }
        Ok(Sent { status, retry_after: None })
    }
}

struct Stage {
    memory: Arc<Memory>,
    receivers: Arc<Receivers>,
}

impl Stage {
    fn new() -> Self {
        Self { memory: Arc::default(), receivers: Arc::default() }
    }

    async fn subscribe(&self, receiver: &str) -> WebhookId {
        let now = Timestamp::clamped(0);
        let webhook = Webhook {
            id: WebhookId::random(),
            version: 1,
            owner: Owner::default(),
            url: format!("https://example.org/{receiver}"),
            description: None,
            selection: Selection::default(),
            secret: SigningSecret::random(),
            replaced: None,
            status: Status::Enabled,
            created_at: now,
            updated_at: now,
        };
        let settled = self.memory.settled().await.unwrap();
        self.memory.insert_webhook(&webhook, settled).await.unwrap();
        webhook.id
    }

    fn server(&self, name: &str) -> Couriers {
        self.server_with(name, Settings::default())
    }

    fn server_with(&self, name: &str, settings: Settings) -> Couriers {
        let pace = Pace {
            first: Duration::from_millis(2),
            longest: Duration::from_millis(10),
            give_up_after: settings.pace.give_up_after,
        };
        let quick = Settings {
            pace,
            look_every: Duration::from_millis(5),
            // A test that has to wait for its turn must not look like a server that has died.
            lease: Duration::from_secs(60),
            drain: Duration::from_millis(20),
            ..settings
        };
        let ports = (self.memory.clone() as Arc<dyn WebhookStore>, self.memory.clone() as Arc<dyn Events>);
        Couriers::start(name.into(), ports, self.receivers.clone(), Arc::new(SystemClock), quick)
    }
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waited = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(60), waited).await.unwrap_or_else(|_| panic!("never: {what}"));
}

#[tokio::test]
async fn subjects_are_told_in_order_and_hold_up_nobody_else() {
    let stage = Stage::new();
    let id = stage.subscribe("r").await;
    let server = stage.server("one");
    let (a, b) = (SandboxId::random(), SandboxId::random());
    stage.receivers.answer("r#1", 500);
    stage.memory.happen(&[a, a, b, b, a]);
    until("the others", || stage.receivers.got("r").ends_with(&[4]) || stage.receivers.got("r").contains(&4))
        .await;
    assert!(!stage.receivers.got("r").contains(&2), "the second of its subject waits for the first");
    stage.receivers.answer("r#1", 200);
    until("everything", || stage.memory.states(id) == [DeliveryState::Delivered; 5]).await;
    let got = stage.receivers.got("r");
    let of = |of: &[u64]| got.iter().copied().filter(|seq| of.contains(seq)).collect::<Vec<_>>();
    let of_a = of(&[1, 2, 5]);
    assert!(of_a.is_sorted() && of_a.ends_with(&[1, 2, 5]), "{got:?}");
    assert_eq!(of(&[3, 4]), [3, 4]);
    assert_eq!(stage.memory.with(id, |row| row.health.failures), Some(0));
    server.stop().await;
}

#[tokio::test]
async fn a_receiver_that_never_answers_delays_no_other() {
    let stage = Stage::new();
    let (slow, fast) = (stage.subscribe("slow").await, stage.subscribe("fast").await);
    stage.receivers.answer("slow", 0);
    let server = stage.server("one");
    let subjects: Vec<_> = (0..50).map(|_| SandboxId::random()).collect();
    stage.memory.happen(&subjects);
    until("the fast one", || stage.memory.states(fast) == [DeliveryState::Delivered; 50]).await;
    until("the slow one is asked", || stage.receivers.got("slow").len() == 8).await;
    assert_eq!(stage.memory.states(slow), [DeliveryState::Pending; 50]);
    server.stop().await;
    assert_eq!(stage.receivers.got("slow").len(), 8, "bounded");
}

#[tokio::test]
async fn a_restart_loses_nothing_and_repeats_what_was_under_way() {
    let stage = Stage::new();
    let id = stage.subscribe("r").await;
    let (a, b) = (SandboxId::random(), SandboxId::random());
    stage.receivers.answer("r#2", 0);
    let server = stage.server("one");
    stage.memory.happen(&[a, a, b]);
    until("what can arrive", || stage.receivers.got("r").len() == 3).await;
    let arrived = |seq: u64| {
        let state = stage.memory.with(id, |row| row.deliveries.get(&seq).map(|d| d.state));
        state.flatten() == Some(DeliveryState::Delivered)
    };
    until("recorded", || arrived(1) && arrived(3)).await;
    server.stop().await;
    // Happens while no server is there.
    stage.memory.happen(&[a, b]);
    stage.receivers.answer("r#2", 200);
    let next = stage.server("two");
    until("everything", || stage.memory.states(id) == [DeliveryState::Delivered; 5]).await;
    let mut got = stage.receivers.got("r");
    got.sort_unstable();
    assert_eq!(got, [1, 2, 2, 3, 4, 5]);
    next.stop().await;
}

#[tokio::test]
async fn one_of_two_servers_sends_and_the_other_takes_over() {
    let stage = Stage::new();
    let id = stage.subscribe("r").await;
    let (one, two) = (stage.server("one"), stage.server("two"));
    let subjects: Vec<_> = (0..30).map(|_| SandboxId::random()).collect();
    stage.memory.happen(&subjects);
    until("everything", || stage.memory.states(id) == [DeliveryState::Delivered; 30]).await;
    assert_eq!(stage.receivers.got("r").len(), 30, "nothing came twice");
    let holder = || stage.memory.with(id, |row| row.lease.clone().map(|(by, _)| by)).flatten();
    let first = holder().unwrap();
    // It dies: nobody gives the lease back.
    let (dead, alive) = if first == "one" { (one, two) } else { (two, one) };
    dead.0.stopping.cancel();
    stage.memory.with(id, |row| {
        row.lease = Some((first.clone(), SystemClock.now().checked_add(Duration::from_millis(50)).unwrap()))
    });
    stage.memory.happen(&subjects);
    until("the rest", || stage.memory.states(id) == [DeliveryState::Delivered; 60]).await;
    assert_eq!(stage.receivers.got("r").len(), 60);
    assert_ne!(holder(), Some(first));
    alive.stop().await;
    dead.stop().await;
}

#[tokio::test]
async fn who_wants_nothing_or_never_answers_well_is_left_alone() {
    let stage = Stage::new();
    let (gone, failing) = (stage.subscribe("gone").await, stage.subscribe("failing").await);
    stage.receivers.answer("gone", 410);
    stage.receivers.answer("failing", 500);
    let server = stage
        .server_with("one", Settings { disable_after: Duration::from_millis(20), ..Settings::default() });
    let a = SandboxId::random();
    stage.memory.happen(&[a, a]);
    for (id, expected) in [(gone, Why::Gone), (failing, Why::Failing)] {
        let why = || match stage.memory.with(id, |row| row.webhook.status) {
            Some(Status::Disabled { why, .. }) => Some(why),
            _ => None,
        };
        until("disabled", || why().is_some()).await;
        assert_eq!(why(), Some(expected));
        until("nothing waits", || stage.memory.states(id) == [DeliveryState::Dead; 2]).await;
    }
    let tried: BTreeSet<_> = stage.receivers.got("failing").into_iter().collect();
    assert_eq!(tried, BTreeSet::from([1]));
    server.stop().await;
}

#[tokio::test]
async fn what_cannot_be_delivered_is_dead_and_the_next_follows() {
    let stage = Stage::new();
    let id = stage.subscribe("r").await;
    stage.receivers.answer("r#1", 400);
    let pace = Pace { give_up_after: Duration::from_millis(20), ..Pace::default() };
    let server = stage.server_with("one", Settings { pace, ..Settings::default() });
    let a = SandboxId::random();
    stage.memory.happen(&[a, a]);
    until("both ended", || stage.memory.states(id) == [DeliveryState::Dead, DeliveryState::Delivered]).await;
    server.stop().await;
}

#[tokio::test]
async fn a_test_is_sent_at_once_and_leaves_no_row() {
    let stage = Stage::new();
    let id = stage.subscribe("r").await;
    let server = stage.server("one");
    let (webhook, _) = stage.memory.webhook(id).await.unwrap().unwrap();
    stage.receivers.answer("r", 503);
    let tested = server.test(&webhook).await;
    assert_eq!((tested.attempt.status, tested.attempt.error.is_some()), (Some(503), true));
    assert_eq!(stage.memory.states(id), []);
    server.stop().await;
}
