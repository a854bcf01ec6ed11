//! Rows: a webhook, what is known of its receiver, and what was or is to be sent to it.

use std::time::Duration;

use sandglass_sandbox::{Timestamp, WebhookId};
use serde::{Deserialize, Serialize};

use crate::{ports::Owner, secret::SigningSecret, selection::Selection};

/// A subscription.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    pub id: WebhookId,
    /// Grows with every write.
    pub version: u64,
    /// Whose events it gets: nobody's name means everybody's.
    pub owner: Owner,
    pub url: String,
    pub description: Option<String>,
    pub selection: Selection,
    pub secret: SigningSecret,
    /// What messages are signed with besides, until then: receivers know the new one a little later.
    pub replaced: Option<(SigningSecret, Timestamp)>,
    pub status: Status,
    pub created_at: Timestamp,
    pub updated_at: Timestamp,
}

impl Webhook {
    /// The signatures of a message, one word each.
    pub fn signatures(&self, id: &str, now: Timestamp, body: &str) -> String {
        let seconds = now.as_millis() / 1000;
        let mut signatures = self.secret.sign(id, seconds, body);
        if let Some((old, _)) = self.replaced.as_ref().filter(|(_, until)| *until > now) {
            signatures = format!("{signatures} {}", old.sign(id, seconds, body));
        }
        signatures
    }
}

/// Whether anything is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "state")]
pub enum Status {
    Enabled,
    Disabled { why: Why, since: Timestamp },
}

/// Who disabled a webhook.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Why {
    /// Whoever owns it.
    Asked,
    /// The server, because nothing arrived for too long.
    Failing,
    /// The receiver, which answered 410.
    Gone,
}

impl Why {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Asked => "asked",
            Self::Failing => "failing",
            Self::Gone => "gone",
        }
    }
}

/// How the receiver has been doing.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Health {
    /// Failed attempts since the last message that arrived.
    pub failures: u64,
    /// The first of them.
    pub failing_since: Option<Timestamp>,
    pub last_delivered_at: Option<Timestamp>,
}

/// Fewer failures say nothing, however far apart they are.
const SUSTAINED: u64 = 10;

impl Health {
    /// After an attempt.
    pub fn after(self, arrived: bool, now: Timestamp) -> Self {
        if arrived {
            return Self { failures: 0, failing_since: None, last_delivered_at: Some(now) };
        }
        Self {
            failures: self.failures.saturating_add(1),
            failing_since: self.failing_since.or(Some(now)),
            ..self
        }
    }

    /// Whether the receiver is to be left alone.
    pub fn is_hopeless(&self, disable_after: Duration, now: Timestamp) -> bool {
        self.failures >= SUSTAINED
            && self.failing_since.is_some_and(|since| since.until(now) >= disable_after)
    }
}

/// Where a delivery stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum DeliveryState {
    Pending,
    Delivered,
    /// Given up.
    Dead,
}

impl DeliveryState {
    /// The word on the wire and in the store.
    pub fn word(self) -> &'static str {
        match self {
            Self::Pending => "Pending",
            Self::Delivered => "Delivered",
            Self::Dead => "Dead",
        }
    }
}

/// One message to one receiver.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Delivery {
    /// The event's place in the log.
    pub seq: u64,
    /// The same for every attempt, and for no other message.
    pub message_id: String,
    /// Deliveries of one subject go one after the other.
    pub subject: String,
    /// The type of the event.
    pub kind: String,
    /// What is sent; empty when that is over.
    pub body: String,
    pub state: DeliveryState,
    pub attempts: u32,
    /// The latest of them, oldest first.
    pub last: Vec<Attempt>,
    pub created_at: Timestamp,
    pub first_attempt_at: Option<Timestamp>,
    /// Not before.
    pub next_at: Timestamp,
    pub finished_at: Option<Timestamp>,
}

impl Delivery {
    /// One that is to be sent at once.
    pub fn new(
        seq: u64,
        message_id: String,
        subject: String,
        kind: String,
        body: String,
        now: Timestamp,
    ) -> Self {
        Self {
            seq,
            message_id,
            subject,
            kind,
            body,
            state: DeliveryState::Pending,
            attempts: 0,
            last: Vec::new(),
            created_at: now,
            first_attempt_at: None,
            next_at: now,
            finished_at: None,
        }
    }

    /// Nothing more is sent.
    pub fn finish(&mut self, state: DeliveryState, now: Timestamp) {
        self.state = state;
        self.finished_at = Some(now);
        self.body.clear();
    }
}

/// One attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Attempt {
    pub at: Timestamp,
    pub status: Option<u16>,
    pub error: Option<String>,
    pub duration_ms: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_given_up_after_many_failures_over_a_long_time() {
        let at = |s: i64| Timestamp::clamped(s * 1000);
        let limit = Duration::from_secs(100);
        let mut health = Health::default();
        for n in 0..9 {
            health = health.after(false, at(n));
        }
        assert!(!health.is_hopeless(limit, at(1000)), "nine say nothing");
        health = health.after(false, at(99));
        assert!(!health.is_hopeless(limit, at(99)) && health.is_hopeless(limit, at(100)));
        let well = health.after(true, at(101));
        assert_eq!((well.failures, well.failing_since, well.last_delivered_at), (0, None, Some(at(101))));
    }
}
