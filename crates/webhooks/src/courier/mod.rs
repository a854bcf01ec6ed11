//! Who sends: one task a webhook, on the one server that has the lease on it.
//!
//! A slow receiver keeps its own task busy and nobody else's. A server that dies loses its leases after a while; one that ends gives
//! them back. What was under way then is sent again, everything else exactly once.

mod carry;
mod lanes;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use sandglass_sandbox::{Clock, Timestamp, WebhookId};
use serde_json::json;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};
use uuid::Uuid;

use crate::{
    pace::Pace,
    ports::{Events, Request, Sender, WebhookStore},
    record::{Attempt, Status, Webhook},
};

/// The numbers of the driver.
#[derive(Debug, Clone)]
pub struct Settings {
    pub pace: Pace,
    /// A webhook to which nothing arrived for so long is disabled.
    pub disable_after: Duration,
    /// Deliveries to one receiver at a time.
    pub concurrency: usize,
    /// Deliveries of one webhook that may wait; the rest waits in the log.
    pub backlog: usize,
    /// How long a claim on a webhook holds without being renewed.
    pub lease: Duration,
    /// How often it is looked for webhooks, and for events that nobody told of.
    pub look_every: Duration,
    /// How long deliveries that ended are kept.
    pub keep: Duration,
    /// Of each webhook, at most.
    pub keep_count: u32,
    /// What the end of the server leaves for deliveries that are under way.
    pub drain: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            pace: Pace::default(),
            disable_after: Duration::from_secs(72 * 3600),
            concurrency: 8,
            backlog: 1000,
            lease: Duration::from_secs(15),
            look_every: Duration::from_secs(1),
            keep: Duration::from_secs(24 * 3600),
            keep_count: 1000,
            drain: Duration::from_secs(2),
        }
    }
}

/// What a test of a webhook came to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tested {
    pub message_id: String,
    pub attempt: Attempt,
}

struct Inner {
    store: Arc<dyn WebhookStore>,
    events: Arc<dyn Events>,
    sender: Arc<dyn Sender>,
    clock: Arc<dyn Clock>,
    settings: Settings,
    /// This server, among those that share the store.
    name: String,
    poked: Notify,
    /// How far the log is known to be complete.
    settled: watch::Sender<u64>,
    stopping: CancellationToken,
    tasks: TaskTracker,
}

/// See the module documentation.
#[derive(Clone)]
pub struct Couriers(Arc<Inner>);

impl std::fmt::Debug for Couriers {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Couriers").field("name", &self.0.name).finish_non_exhaustive()
    }
}

/// Between two looks at the log, however much is written.
const BREATH: Duration = Duration::from_millis(10);
/// Between two looks for deliveries to forget.
const FORGET_EVERY: Duration = Duration::from_secs(60);

impl Couriers {
    /// Begins to send. `name` is this server's among those that share the store: one that is started again under the same name
    /// has its leases still.
    pub fn start(
        name: String,
        (store, events): (Arc<dyn WebhookStore>, Arc<dyn Events>),
        sender: Arc<dyn Sender>,
        clock: Arc<dyn Clock>,
        settings: Settings,
    ) -> Self {
        let inner = Arc::new(Inner {
            store,
            events,
            sender,
            clock,
            settings,
            name,
            poked: Notify::new(),
            settled: watch::Sender::new(0),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        inner.tasks.spawn(oversee(inner.clone()));
        inner.tasks.spawn(follow(inner.clone()));
        Self(inner)
    }

    /// Webhooks were changed: they are looked at now.
    pub fn changed(&self) {
        self.0.poked.notify_one();
    }

    /// The end of the log as it is now, from which a new webhook is told.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn now(&self) -> Result<u64, sandglass_sandbox::ports::store::StoreError> {
        self.0.events.settled().await
    }

    /// Sends a message of the type `webhook.test`, once, whether the webhook is enabled or not.
    pub async fn test(&self, webhook: &Webhook) -> Tested {
        let now = self.0.clock.now();
        let message_id = format!("msg_test_{}", Uuid::new_v4().as_simple());
        let body = json!({
            "type": "webhook.test",
            "timestamp": now.to_string(),
            "data": {"webhookId": webhook.id.to_string()},
        });
        let (outcome, at, took) = self.0.send(webhook, message_id.clone(), body.to_string()).await;
        let error = match &outcome {
            Ok(sent) if sent.is_success() => None,
            Ok(sent) => Some(format!("the receiver answered {}", sent.status)),
            Err(error) => Some(error.to_string()),
        };
        let duration_ms = u64::try_from(took.as_millis()).unwrap_or(u64::MAX);
        let attempt = Attempt { at, status: outcome.ok().map(|sent| sent.status), error, duration_ms };
        Tested { message_id, attempt }
    }

    /// Ends. What is under way gets a moment, and is sent again by the next server if that was too short.
    pub async fn stop(&self) {
        self.0.stopping.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }
}

impl Inner {
    async fn send(
        &self,
        webhook: &Webhook,
        id: String,
        body: String,
    ) -> (Result<crate::ports::Sent, crate::ports::SendError>, Timestamp, Duration) {
        let (at, begun) = (self.clock.now(), Instant::now());
        let signatures = webhook.signatures(&id, at, &body);
        let request =
            Request { url: webhook.url.clone(), id, timestamp: at.as_millis() / 1000, signatures, body };
        let outcome = self.sender.send(&request).await;
        (outcome, at, begun.elapsed())
    }
}

/// A task that carries for one webhook.
struct Courier {
    told: watch::Sender<Arc<Webhook>>,
    cancel: CancellationToken,
    task: JoinHandle<()>,
}

/// Starts and ends couriers as webhooks come and go.
async fn oversee(inner: Arc<Inner>) {
    let mut running: HashMap<WebhookId, Courier> = HashMap::new();
    let mut forgotten: Option<Instant> = None;
    loop {
        running.retain(|_, courier| !courier.task.is_finished());
        match inner.store.webhooks().await {
            Ok(all) => assign(&inner, &mut running, all.into_iter().map(|(webhook, _)| webhook)),
            Err(error) => warn!(%error, "webhooks cannot be read; trying again"),
        }
        if forgotten.is_none_or(|at| at.elapsed() >= FORGET_EVERY) {
            forgotten = Some(Instant::now());
            forget(&inner).await;
        }
        tokio::select! {
            () = inner.poked.notified() => {}
            () = tokio::time::sleep(inner.settings.look_every) => {}
            () = inner.stopping.cancelled() => return,
        }
    }
}

fn assign(inner: &Arc<Inner>, running: &mut HashMap<WebhookId, Courier>, all: impl Iterator<Item = Webhook>) {
    let wanted: HashMap<WebhookId, Arc<Webhook>> = all
        .filter(|webhook| webhook.status == Status::Enabled)
        .map(|webhook| (webhook.id, Arc::new(webhook)))
        .collect();
    for (id, courier) in running.iter() {
        match wanted.get(id) {
            None => courier.cancel.cancel(),
            Some(webhook) => {
                let newer = |known: &Arc<Webhook>| known.version != webhook.version;
                if newer(&courier.told.borrow()) {
                    courier.told.send_replace(webhook.clone());
                }
            }
        }
    }
    for (id, webhook) in wanted {
        running.entry(id).or_insert_with(|| {
            let told = watch::Sender::new(webhook);
            let cancel = inner.stopping.child_token();
            let task = inner.tasks.spawn(carry::run(inner.clone(), told.subscribe(), cancel.clone()));
            Courier { told, cancel, task }
        });
    }
}

async fn forget(inner: &Inner) {
    let age = i64::try_from(inner.settings.keep.as_millis()).unwrap_or(i64::MAX);
    let before = Timestamp::clamped(inner.clock.now().as_millis().saturating_sub(age));
    match inner.store.prune_deliveries(before, inner.settings.keep_count).await {
        Ok(rows) => debug!(rows, "deliveries forgotten"),
        Err(error) => warn!(%error, "old deliveries cannot be forgotten; trying again"),
    }
}

/// Keeps known how far the log reaches, for all couriers together.
async fn follow(inner: Arc<Inner>) {
    loop {
        tokio::select! {
            () = inner.events.grown() => {}
            () = tokio::time::sleep(inner.settings.look_every) => {}
            () = inner.stopping.cancelled() => return,
        }
        if inner.settled.receiver_count() > 0 {
            match inner.events.settled().await {
                Ok(settled) => {
                    inner.settled.send_if_modified(|known| std::mem::replace(known, settled) != settled);
                }
                Err(error) => warn!(%error, "the log of events cannot be read; trying again"),
            }
        }
        tokio::time::sleep(BREATH).await;
    }
}
