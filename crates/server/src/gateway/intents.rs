//! Tells whoever extends lives that a sandbox is used: a Redis list, or the server itself.
//!
//! At most one message for each sandbox in an interval, whatever becomes of it. Remembers at most [`REMEMBERED`] sandboxes.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;

use super::directory::Used;
use super::feed::Server;
use super::queue::Queue;
use crate::renewal::resp::{Address, Connection, WireError};

/// Messages that may wait.
const WAITING: usize = 8192;
const AT_ONCE: usize = 4;
const REMEMBERED: usize = 65_536;
/// A message and its answer.
const ROUND_TRIP: Duration = Duration::from_secs(5);

/// To whom, and how often.
#[derive(Clone, Debug)]
pub struct IntentSettings {
    pub redis: Option<RedisList>,
    /// Zero: every use.
    pub interval: Duration,
}

/// A list in Redis.
#[derive(Clone, Debug)]
pub struct RedisList {
    pub address: Address,
    pub key: String,
    /// 0: it is never trimmed.
    pub longest: u64,
}

#[derive(Clone, Debug, Serialize, PartialEq, Eq)]
struct Message {
    sandbox_id: String,
    observed_at: String,
    port: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    request_uri: Option<String>,
}

/// See the module documentation. Clones share the queue.
#[derive(Clone, Debug)]
pub struct Intents {
    queue: Queue<Message>,
    pace: Arc<Pace>,
    /// Redis is told of every sandbox, because its consumer knows which live on; the server of those that do.
    renewable_only: bool,
}

impl Intents {
    /// Starts the workers. They end when the last clone is gone and the queue is empty.
    pub(super) fn start(settings: IntentSettings, server: &Server, tasks: &TaskTracker) -> Self {
        let renewable_only = settings.redis.is_none();
        let sender =
            Arc::new(Sender { server: server.clone(), redis: settings.redis, idle: Mutex::default() });
        let work = move |message: Message| {
            let sender = sender.clone();
            async move { sender.send(message).await }
        };
        let queue = Queue::start((WAITING, AT_ONCE), tasks, work);
        Self { queue, pace: Arc::new(Pace::new(settings.interval)), renewable_only }
    }

    /// Whether use of a sandbox matters whose life it extends, or does not.
    pub(super) fn counts(&self, renews: bool) -> bool {
        renews || !self.renewable_only
    }

    pub(super) fn used(&self, used: Used<'_>) {
        if !self.counts(used.renews) || !self.pace.allows(used.id, Instant::now()) {
            return;
        }
        self.queue.put(Message {
            sandbox_id: used.id.to_owned(),
            observed_at: jiff::Timestamp::now().to_string(),
            port: used.port,
            request_uri: used.path.map(str::to_owned),
        });
    }
}

/// When each sandbox may be told of again.
#[derive(Debug)]
struct Pace {
    interval: Duration,
    told: Mutex<Told>,
}

#[derive(Debug)]
struct Told {
    at: HashMap<String, Instant>,
    swept: Instant,
}

impl Pace {
    fn new(interval: Duration) -> Self {
        Self { interval, told: Mutex::new(Told { at: HashMap::new(), swept: Instant::now() }) }
    }

    fn allows(&self, id: &str, now: Instant) -> bool {
        if self.interval.is_zero() {
            return true;
        }
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        if told.at.get(id).is_some_and(|at| now.saturating_duration_since(*at) < self.interval) {
            return false;
        }
        if told.at.len() >= REMEMBERED || now.saturating_duration_since(told.swept) >= self.interval * 2 {
            let interval = self.interval;
            told.at.retain(|_, at| now.saturating_duration_since(*at) < interval);
            told.swept = now;
        }
        if told.at.len() < REMEMBERED {
            told.at.insert(id.to_owned(), now);
        }
        true
    }
}

struct Sender {
    server: Server,
    redis: Option<RedisList>,
    /// Connections between two messages; at most as many as workers.
    idle: Mutex<Vec<Connection>>,
}

impl Sender {
    async fn send(&self, message: Message) {
        let sent = async {
            match &self.redis {
                Some(list) => self.push(list, &message).await.map_err(|error| error.to_string()),
                None => self.server.used(&message.sandbox_id).await.map_err(|error| error.to_string()),
            }
        };
        let failed = match timeout(ROUND_TRIP, sent).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => error,
            Err(_) => "no answer in time".to_owned(),
        };
        tracing::warn!(sandbox = message.sandbox_id, error = failed, "a use could not be reported");
    }

    async fn push(&self, list: &RedisList, message: &Message) -> Result<(), WireError> {
        let text = serde_json::to_string(message).unwrap_or_default();
        let kept = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let pushed = match kept {
            Some(mut connection) => connection.push(list, &text).await.map(|()| connection),
            None => Err(WireError::Protocol),
        };
        let connection = match pushed {
            Ok(connection) => connection,
            // One that was kept may have been closed meanwhile.
            Err(_) => {
                let mut fresh = list.address.connect().await?;
                fresh.push(list, &text).await?;
                fresh
            }
        };
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(connection);
        Ok(())
    }
}

impl Connection {
    /// Adds a value to the list and trims it, in one round trip.
    async fn push(&mut self, list: &RedisList, value: &str) -> Result<(), WireError> {
        let push = ["LPUSH", list.key.as_str(), value];
        if list.longest == 0 {
            return self.demand_all(&[&push]).await;
        }
        let last = (list.longest - 1).to_string();
        self.demand_all(&[&push, &["LTRIM", list.key.as_str(), "0", last.as_str()]]).await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn one_message_an_interval() {
        let (pace, start) = (Pace::new(Duration::from_secs(60)), Instant::now());
        assert!(pace.allows("a", start) && pace.allows("b", start));
        assert!(!pace.allows("a", start + Duration::from_secs(59)));
        assert!(pace.allows("a", start + Duration::from_secs(60)));
        assert!(pace.allows("c", start + Duration::from_secs(125)));
        assert_eq!(pace.told.lock().unwrap().at.len(), 1, "what is over is forgotten");
        let every = Pace::new(Duration::ZERO);
        assert!(every.allows("a", start) && every.allows("a", start));
    }

    #[test]
    fn messages_look_as_published() {
        let message = |request_uri: Option<&str>| Message {
            sandbox_id: "s".to_owned(),
            observed_at: "2026-01-02T03:04:05Z".to_owned(),
            port: 80,
            request_uri: request_uri.map(str::to_owned),
        };
        assert_eq!(
            serde_json::to_string(&message(Some("/x"))).unwrap(),
            r#"{"sandbox_id":"s","observed_at":"2026-01-02T03:04:05Z","port":80,"request_uri":"/x"}"#
        );
        assert!(!serde_json::to_string(&message(None)).unwrap().contains("request_uri"));
    }
}
