//! The consumers of the list in Redis.
//!
//! Each has a connection of its own and finishes a message before it takes the next one: what cannot be handled yet stays in Redis, not in
//! this process. There is no acknowledgement; a message that was taken when the process died is lost, and the next use sends another.
//!
//! Redis may be away at the start or later: the consumers come back by themselves.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use tracing::{info, warn};

use super::{
    Shared,
    resp::{Address, AddressError, Connection, Popped, WireError},
};
use crate::{
    config::RedisConfig,
    telemetry::metrics::{RenewOutcome, RenewSource},
};

/// How long one look at an empty list lasts. Also how long a stop may take: to leave in the middle could lose a message.
const WAIT_SECONDS: u32 = 1;
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

pub(super) fn spawn(shared: &Arc<Shared>, dsn: &str, config: &RedisConfig) -> Result<(), AddressError> {
    let address = Address::parse(dsn)?;
    shared.metrics.change_redis_consumers(0);
    let away = Arc::new(AtomicBool::new(false));
    for _ in 0..config.consumer_concurrency {
        let consumer = Consumer {
            shared: shared.clone(),
            address: address.clone(),
            key: config.queue_key.clone(),
            away: away.clone(),
        };
        shared.tasks.spawn(async move { consumer.run().await });
    }
    Ok(())
}

struct Consumer {
    shared: Arc<Shared>,
    address: Address,
    key: String,
    /// Shared by all consumers, so that one of them tells of a Redis that is away, and one of its return.
    away: Arc<AtomicBool>,
}

impl Consumer {
    async fn run(&self) {
        let stop = &self.shared.stop;
        let mut pause = FIRST_PAUSE;
        while !stop.is_cancelled() {
            let connected = tokio::select! {
                connected = self.address.connect() => connected,
                () = stop.cancelled() => return,
            };
            let error = match connected {
                Ok(connection) => {
                    self.shared.metrics.change_redis_consumers(1);
                    let ended = self.consume(connection, &mut pause).await;
                    self.shared.metrics.change_redis_consumers(-1);
                    ended
                }
                Err(error) => Err(error),
            };
            let Err(error) = error else { return };
            if !self.away.swap(true, Relaxed) {
                let error: &(dyn std::error::Error + 'static) = &error;
                warn!(error, "renew messages cannot be taken from Redis; trying again");
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                () = stop.cancelled() => return,
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Takes messages until the connection breaks or the server stops.
    async fn consume(&self, mut connection: Connection, pause: &mut Duration) -> Result<(), WireError> {
        while !self.shared.stop.is_cancelled() {
            let popped = connection.pop(&self.key, WAIT_SECONDS).await?;
            // Only an answer shows that it works: a full Redis accepts connections and refuses commands.
            *pause = FIRST_PAUSE;
            if self.away.swap(false, Relaxed) {
                info!("renew messages are taken from Redis again");
            }
            match popped {
                Popped::Value(text) => self.shared.take(&text).await,
                Popped::TooLong => {
                    self.shared.metrics.count_renewal(RenewSource::Redis, RenewOutcome::Invalid);
                }
                Popped::Nothing => {}
            }
        }
        Ok(())
    }
}
