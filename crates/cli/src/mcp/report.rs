//! Progress notifications: what a command prints, while it prints it.
//!
//! Bound: 64 KiB wait to be sent at most, since the producer is not asked for more before; after 1 MiB in one call only the
//! amount is told. A client that reads slowly slows the command down.

use std::time::Duration;

use rmcp::{
    Peer, RoleServer,
    model::{ProgressNotificationParam, ProgressToken},
};
use tokio::time::Instant;

/// Output is gathered for so long, so that a chatty command does not drown its reader.
const GATHERED: Duration = Duration::from_millis(100);
/// Text of one notification.
const LONGEST_MESSAGE: usize = 64 << 10;
/// Text of all notifications of one call.
const MOST_TEXT: u64 = 1 << 20;

/// Sends progress of one call.
#[derive(Debug)]
pub struct Reporter {
    peer: Peer<RoleServer>,
    token: Option<ProgressToken>,
    waiting: Vec<u8>,
    since: Option<Instant>,
    /// Bytes or steps so far: the protocol wants a number that grows.
    progress: f64,
    told: u64,
}

impl Reporter {
    pub(super) fn new(peer: Peer<RoleServer>, token: Option<ProgressToken>) -> Self {
        Self { peer, token, waiting: Vec::new(), since: None, progress: 0.0, told: 0 }
    }

    /// A step was made.
    pub async fn step(&mut self, message: &str) {
        self.progress += 1.0;
        self.send(message.to_owned()).await;
    }

    /// Output arrived.
    pub async fn output(&mut self, bytes: &[u8]) {
        if self.token.is_none() {
            return;
        }
        self.waiting.extend_from_slice(bytes);
        self.since.get_or_insert_with(Instant::now);
        if self.waiting.len() >= LONGEST_MESSAGE {
            self.flush().await;
        }
    }

    /// When [`Reporter::flush`] is due; never, while nothing waits. Safe to cancel.
    pub async fn due(&self) {
        match self.since {
            Some(since) => tokio::time::sleep_until(since + GATHERED).await,
            None => std::future::pending().await,
        }
    }

    /// Sends what waits.
    pub async fn flush(&mut self) {
        self.since = None;
        if self.waiting.is_empty() {
            return;
        }
        let waiting = std::mem::take(&mut self.waiting);
        self.told += waiting.len() as u64;
        self.progress += waiting.len() as f64;
        let message = if self.told <= MOST_TEXT {
            String::from_utf8_lossy(&waiting).into_owned()
        } else {
            format!("[{} bytes of output so far]", self.told)
        };
        self.send(message).await;
    }

    async fn send(&self, message: String) {
        let Some(token) = self.token.clone() else { return };
        let note = ProgressNotificationParam::new(token, self.progress).with_message(message);
        // A client that has gone is noticed by whoever waits for its next request.
        let _ = self.peer.notify_progress(note).await;
    }
}
