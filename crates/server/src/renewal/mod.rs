//! Sandboxes that live on while they are used.
//!
//! Uses come from two sides: requests through this server's proxy ([`Renewals::used`]) and messages of an ingress elsewhere, taken from a
//! Redis list ([`redis`]). Owns how often a sandbox is renewed; what a renewal is belongs to the engine ([`Engine::extend`]).
//!
//! Invariants: a request never waits for a renewal; per sandbox one attempt at a time; what waits is bounded. Failures are logged and
//! counted, and change nothing else.
//!
//! How often: a request renews a sandbox at most once in `min_interval_seconds`. A message is dropped when the use that it reports was
//! before the last renewal, which makes up for it, or within a second after it; further than that the producer is expected to pause
//! between its messages, so `min_interval_seconds` does not apply to them.

mod book;
mod message;
mod redis;
pub(crate) mod resp;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, Weak},
    time::Duration,
};

use futures_util::StreamExt as _;
use sandglass_sandbox::SandboxId;
use tokio::{sync::mpsc, time::Instant};
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{debug, warn};

use crate::{
    config::RenewIntentConfig,
    engine::{Engine, extend::Extended},
    telemetry::metrics::{Metrics, RenewOutcome, RenewSource},
};
use book::{Book, Ended};
use message::{Message, Unfit};

pub use resp::{Address as RedisAddress, AddressError};

/// Attempts that wait; further ones are dropped, and the next request tries again.
const WAITING: usize = 1024;
/// Attempts of the proxy's side at the same time.
const AT_ONCE: usize = 8;
/// Least time between two renewals of one sandbox by messages.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(1);

/// See the module documentation. Clones share it.
#[derive(Clone)]
pub struct Renewals(Arc<Shared>);

struct Shared {
    /// Weak: the engine holds the ingress, and the ingress holds this.
    engine: Weak<Engine>,
    interval: Duration,
    book: Mutex<Book>,
    queue: mpsc::Sender<SandboxId>,
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl std::fmt::Debug for Renewals {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Renewals").field("interval", &self.0.interval).finish_non_exhaustive()
    }
}

impl Renewals {
    /// Starts what the configuration asks for; `None` when it asks for nothing.
    ///
    /// # Errors
    /// When the address of Redis cannot be understood. Whether anybody answers there does not matter.
    pub fn start(
        engine: &Arc<Engine>,
        config: &RenewIntentConfig,
        metrics: Arc<Metrics>,
    ) -> Result<Option<Self>, AddressError> {
        if !config.enabled {
            return Ok(None);
        }
        let (queue, waiting) = mpsc::channel(WAITING);
        let shared = Arc::new(Shared {
            engine: Arc::downgrade(engine),
            interval: config.min_interval,
            book: Mutex::default(),
            queue,
            metrics,
            stop: CancellationToken::new(),
            tasks: TaskTracker::new(),
        });
        if config.redis.enabled
            && let Some(dsn) = &config.redis.dsn
        {
            redis::spawn(&shared, dsn.expose(), &config.redis)?;
        }
        let worker = shared.clone();
        shared.tasks.spawn(async move {
            let attempts = ReceiverStream::new(waiting).for_each_concurrent(AT_ONCE, |id| {
                let worker = worker.clone();
                async move { worker.attempt(RenewSource::Proxy, id).await }
            });
            tokio::select! {
                () = attempts => {}
                () = worker.stop.cancelled() => {}
            }
        });
        Ok(Some(Self(shared)))
    }

    /// A request that was admitted used this sandbox. Returns at once.
    pub fn used(&self, id: &str) {
        let Ok(id) = id.parse::<SandboxId>() else { return };
        let shared = &self.0;
        let now = Instant::now();
        // In the order of what it costs: most requests end here.
        if !shared.book().allows(id, now, shared.interval) {
            return;
        }
        let Some(engine) = shared.engine.upgrade() else { return };
        if engine.extension(id).is_none() || !shared.book().begin(id, now, shared.interval) {
            return;
        }
        if shared.queue.try_send(id).is_err() {
            shared.book().end(id, now, Ended::Forget);
            shared.metrics.count_renewal(RenewSource::Proxy, RenewOutcome::Crowded);
        }
    }

    /// Ends the attempts and the consumers. A message that was taken is finished first.
    pub async fn stop(&self) {
        self.0.stop.cancel();
        self.0.tasks.close();
        self.0.tasks.wait().await;
    }
}

impl Shared {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One message from the list.
    async fn take(&self, text: &[u8]) {
        if let Err(outcome) = self.try_take(text).await {
            self.metrics.count_renewal(RenewSource::Redis, outcome);
        }
    }

    async fn try_take(&self, text: &[u8]) -> Result<(), RenewOutcome> {
        let engine = self.engine.upgrade().ok_or(RenewOutcome::Ineligible)?;
        let message = Message::parse(text, engine.clock().now()).map_err(|unfit| match unfit {
            Unfit::Invalid => RenewOutcome::Invalid,
            Unfit::Stale => RenewOutcome::Stale,
        })?;
        let id: SandboxId = message.sandbox.parse().map_err(|_| RenewOutcome::Ineligible)?;
        engine.extension(id).ok_or(RenewOutcome::Ineligible)?;
        drop(engine);
        {
            let mut book = self.book();
            if book.covers(id, message.used_at) || !book.begin(id, Instant::now(), MESSAGE_INTERVAL) {
                return Err(RenewOutcome::TooSoon);
            }
        }
        self.attempt(RenewSource::Redis, id).await;
        Ok(())
    }

    /// One attempt that the book has allowed.
    async fn attempt(&self, source: RenewSource, id: SandboxId) {
        let (ended, outcome) = match self.engine.upgrade() {
            Some(engine) => {
                let extended = engine.extend(id).await;
                let wall = engine.clock().now();
                match extended {
                    Ok(Extended::Until(at)) => {
                        debug!(sandbox = %id, %at, ?source, "renewed, because it is in use");
                        (Ended::Renewed(wall), RenewOutcome::Renewed)
                    }
                    Ok(Extended::Enough) => (Ended::Renewed(wall), RenewOutcome::Enough),
                    Ok(Extended::Ineligible) => (Ended::Forget, RenewOutcome::Ineligible),
                    Err(error) => {
                        warn!(sandbox = %id, %error, ?source, "in use, but could not be renewed");
                        (Ended::Failed, RenewOutcome::Failed)
                    }
                }
            }
            None => (Ended::Forget, RenewOutcome::Ineligible),
        };
        self.book().end(id, Instant::now(), ended);
        self.metrics.count_renewal(source, outcome);
    }
}
