//! The round of one courier: claim, read the log, send, write down.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{Timestamp, WebhookId, ports::store::StoreError};
use tokio::{sync::watch, task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use super::{Inner, lanes::Lanes};
use crate::{
    ports::{Claim, Fenced, SendError, Sent},
    record::{Delivery, Health, Status, Webhook, Why},
};

/// Lines of the log that are read at once.
const CHUNK: u32 = 200;
/// Deliveries at a time to a receiver that fails.
const CAREFUL: usize = 2;
/// After so many failures a success means that the receiver was away, and is back.
const WAS_AWAY: u64 = 5;
/// How long to leave a store alone that does not answer.
const STORE_PAUSE: Duration = Duration::from_secs(1);
/// The status by which a receiver says that it wants nothing any more.
const GONE: u16 = 410;

/// Why a courier ends.
#[derive(Debug)]
enum End {
    /// Asked to.
    Cancelled,
    /// Another server has the lease, or the webhook was changed or removed.
    Lost,
    Disabled,
    Store(StoreError),
}

impl From<StoreError> for End {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// A delivery that is back, with what came of it.
struct Back {
    delivery: Delivery,
    outcome: Result<Sent, SendError>,
    at: Timestamp,
    took: Duration,
}

struct Round {
    inner: Arc<Inner>,
    id: WebhookId,
    webhook: Arc<Webhook>,
    health: Health,
    lanes: Lanes,
    /// Read up to here; what is kept of that in the store.
    cursor: u64,
    kept: u64,
    renew_at: Instant,
    under_way: JoinSet<Back>,
}

/// Carries until the webhook is gone, disabled or somebody else's.
pub(super) async fn run(
    inner: Arc<Inner>,
    mut told: watch::Receiver<Arc<Webhook>>,
    cancel: CancellationToken,
) {
    let id = told.borrow().id;
    let end = match Round::begin(&inner, &mut told).await {
        Ok(Some(mut round)) => {
            let end = round.carry(&mut told, &cancel).await;
            round.drain().await;
            end
        }
        // Somebody else carries; the next look asks again.
        Ok(None) => return,
        Err(error) => End::Store(error),
    };
    if let End::Store(error) = &end {
        warn!(webhook = %id, %error, "a webhook waits for the store");
        tokio::time::sleep(STORE_PAUSE).await;
    }
    if let Err(error) = inner.store.release(id, &inner.name).await {
        warn!(webhook = %id, %error, "the lease of a webhook runs out by itself");
    }
    inner.poked.notify_one();
}

impl Round {
    async fn begin(
        inner: &Arc<Inner>,
        told: &mut watch::Receiver<Arc<Webhook>>,
    ) -> Result<Option<Self>, StoreError> {
        let webhook = told.borrow_and_update().clone();
        let id = webhook.id;
        let Some(cursor) = inner.store.claim(id, inner.claim()).await? else { return Ok(None) };
        let Some((_, health)) = inner.store.webhook(id).await? else { return Ok(None) };
        let mut lanes = Lanes::default();
        lanes.add(inner.store.pending(id).await?);
        Ok(Some(Self {
            inner: inner.clone(),
            id,
            webhook,
            health,
            lanes,
            cursor,
            kept: cursor,
            renew_at: Instant::now() + inner.settings.lease / 3,
            under_way: JoinSet::new(),
        }))
    }

    async fn carry(&mut self, told: &mut watch::Receiver<Arc<Webhook>>, cancel: &CancellationToken) -> End {
        let mut settled = self.inner.settled.subscribe();
        loop {
            self.webhook = told.borrow_and_update().clone();
            let known = *settled.borrow_and_update();
            if let Err(end) = self.step(known).await {
                return end;
            }
            let due = self.wait();
            tokio::select! {
                Some(back) = self.under_way.join_next(), if !self.under_way.is_empty() => {
                    // A task that broke left its delivery as it was; the next server, or the next claim, sends it.
                    let Ok(back) = back else { return End::Lost };
                    if let Err(end) = self.take_back(back, cancel).await {
                        return end;
                    }
                }
                _ = settled.changed(), if self.has_room() => {}
                changed = told.changed() => if changed.is_err() { return End::Cancelled },
                () = tokio::time::sleep(due) => {}
                () = cancel.cancelled() => return End::Cancelled,
            }
        }
    }

    /// Keeps the lease, reads on, and sends what is due.
    async fn step(&mut self, settled: u64) -> Result<(), End> {
        if Instant::now() >= self.renew_at {
            if self.inner.store.claim(self.id, self.inner.claim()).await?.is_none() {
                return Err(End::Lost);
            }
            self.renew_at = Instant::now() + self.inner.settings.lease / 3;
            if self.kept < self.cursor {
                self.keep(&[]).await?;
            }
        }
        while self.cursor < settled && self.has_room() {
            self.read(settled).await?;
        }
        let now = self.inner.clock.now();
        while self.under_way.len() < self.at_a_time() {
            let Some(delivery) = self.lanes.take(now) else { break };
            let (inner, webhook) = (self.inner.clone(), self.webhook.clone());
            self.under_way.spawn(async move {
                let (id, body) = (delivery.message_id.clone(), delivery.body.clone());
                let (outcome, at, took) = inner.send(&webhook, id, body).await;
                Back { delivery, outcome, at, took }
            });
        }
        Ok(())
    }

    fn has_room(&self) -> bool {
        self.lanes.len() < self.inner.settings.backlog
    }

    fn at_a_time(&self) -> usize {
        let most = self.inner.settings.concurrency.max(1);
        if self.health.failures > 0 { most.min(CAREFUL) } else { most }
    }

    /// How long nothing has to be done unless something happens.
    fn wait(&self) -> Duration {
        let renewal = self.renew_at.saturating_duration_since(Instant::now());
        if self.under_way.len() >= self.at_a_time() {
            return renewal;
        }
        let due = self.lanes.next_at().map(|at| self.inner.clock.now().until(at));
        due.map_or(renewal, |due| due.min(renewal))
    }

    /// Turns a part of the log into deliveries.
    async fn read(&mut self, settled: u64) -> Result<(), End> {
        let taken = self.inner.events.after(self.cursor, settled, CHUNK).await?;
        let now = self.inner.clock.now();
        let webhook = &self.webhook;
        let wanted = taken.messages.iter().filter(|message| webhook.selection.takes(&webhook.owner, message));
        let deliveries: Vec<Delivery> = wanted
            .map(|message| {
                let id = format!("msg_{}_{}", self.id, message.seq);
                let subject = message.subject.to_string();
                Delivery::new(message.seq, id, subject, message.kind.clone(), message.body(), now)
            })
            .collect();
        self.cursor = taken.read_to.max(self.cursor + 1).min(settled);
        if deliveries.is_empty() {
            // Not worth a write of its own: read again, the same is not wanted.
            return Ok(());
        }
        self.keep(&deliveries).await?;
        self.lanes.add(deliveries);
        Ok(())
    }

    async fn keep(&mut self, deliveries: &[Delivery]) -> Result<(), End> {
        let moved = (self.kept, self.cursor);
        let done = self
            .inner
            .store
            .enqueue((self.id, self.webhook.version), &self.inner.name, moved, deliveries)
            .await?;
        if done == Fenced::Lost {
            return Err(End::Lost);
        }
        self.kept = self.cursor;
        Ok(())
    }

    /// Writes down what came of an attempt.
    async fn take_back(&mut self, back: Back, cancel: &CancellationToken) -> Result<(), End> {
        let now = back.at.checked_add(back.took).unwrap_or(back.at);
        let arrived = matches!(&back.outcome, Ok(sent) if sent.is_success());
        let delivery =
            self.inner.settings.pace.after(&back.delivery, (back.at, now), &back.outcome, chance());
        let was_away = arrived && self.health.failures >= WAS_AWAY;
        self.health = self.health.after(arrived, now);
        if let Some(attempt) = delivery.last.last().filter(|_| !arrived) {
            info!(webhook = %self.id, message = delivery.message_id, attempts = delivery.attempts,
                state = delivery.state.word(), error = attempt.error, "a delivery failed");
        }
        loop {
            match self.inner.store.record(self.id, &self.inner.name, &delivery, &self.health).await {
                Ok(Fenced::Written) => break,
                Ok(Fenced::Lost) => return Err(End::Lost),
                // It was sent: to forget that would be to send it again.
                Err(error) => {
                    warn!(webhook = %self.id, %error, "a delivery cannot be recorded; trying again")
                }
            }
            tokio::select! {
                () = tokio::time::sleep(STORE_PAUSE) => {}
                () = cancel.cancelled() => return Err(End::Cancelled),
            }
        }
        self.lanes.put_back(delivery);
        if was_away {
            self.lanes.hurry(now);
        }
        match &back.outcome {
            Ok(sent) if sent.status == GONE => self.disable(Why::Gone, now).await,
            _ if self.health.is_hopeless(self.inner.settings.disable_after, now) => {
                self.disable(Why::Failing, now).await
            }
            _ => Ok(()),
        }
    }

    async fn disable(&mut self, why: Why, now: Timestamp) -> Result<(), End> {
        let disabled = Webhook {
            version: self.webhook.version + 1,
            status: Status::Disabled { why, since: now },
            updated_at: now,
            ..self.webhook.as_ref().clone()
        };
        if self.inner.store.replace_webhook(self.webhook.version, &disabled, None).await? == Fenced::Lost {
            return Err(End::Lost);
        }
        warn!(webhook = %self.id, why = why.word(), "a webhook is disabled");
        self.inner.store.abandon(self.id, now).await?;
        Err(End::Disabled)
    }

    /// What is under way gets a moment, so that it need not be sent twice.
    async fn drain(&mut self) {
        let never = CancellationToken::new();
        let limit = self.inner.settings.drain;
        let rest = async {
            while let Some(back) = self.under_way.join_next().await {
                let Ok(back) = back else { continue };
                if self.take_back(back, &never).await.is_err() {
                    return;
                }
            }
            if self.kept < self.cursor {
                let _ = self.keep(&[]).await;
            }
        };
        let _ = tokio::time::timeout(limit, rest).await;
    }
}

impl Inner {
    fn claim(&self) -> Claim<'_> {
        let now = self.clock.now();
        let until = now.checked_add(self.settings.lease).unwrap_or(now);
        Claim { owner: &self.name, now, until }
    }
}

/// From 0 to 1, by which those that failed together do not come back together.
fn chance() -> f64 {
    f64::from(u32::try_from(Uuid::new_v4().as_u128() & 0xffff_ffff).unwrap_or(0)) / f64::from(u32::MAX)
}
