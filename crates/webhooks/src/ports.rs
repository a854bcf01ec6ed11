//! What the driver needs from outside: rows, the log of events, and the way to receivers.

use std::{collections::BTreeMap, fmt, time::Duration};

use async_trait::async_trait;
use sandglass_sandbox::{ImageBuildId, SandboxId, Timestamp, WebhookId, ports::store::StoreError};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::record::{Delivery, Health, Webhook};

/// What an event is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Subject {
    Sandbox(SandboxId),
    ImageBuild(ImageBuildId),
}

impl Subject {
    /// The member that names it in a message.
    fn member(self) -> &'static str {
        match self {
            Self::Sandbox(_) => "sandboxId",
            Self::ImageBuild(_) => "imageBuildId",
        }
    }

    /// Its identifier alone.
    pub fn id(self) -> String {
        match self {
            Self::Sandbox(id) => id.to_string(),
            Self::ImageBuild(id) => id.to_string(),
        }
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sandbox(id) => write!(f, "sandbox:{id}"),
            Self::ImageBuild(id) => write!(f, "image_build:{id}"),
        }
    }
}

/// Whose something is. Sandboxes are marked with tenants, image builds with namespaces.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Owner {
    pub tenant: Option<String>,
    pub namespace: Option<String>,
}

impl Owner {
    /// Whether an event exists for whoever owns the webhook. Without a tenant that is the operator.
    pub fn may_see(&self, message: &Message) -> bool {
        self.tenant.is_none()
            || match message.subject {
                Subject::Sandbox(_) => self.tenant == message.owner.tenant,
                Subject::ImageBuild(_) => self.namespace == message.owner.namespace,
            }
    }
}

/// An event as receivers get it.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Its place in the log: grows strictly within one subject.
    pub seq: u64,
    pub subject: Subject,
    /// Its type.
    pub kind: String,
    pub at: Timestamp,
    pub owner: Owner,
    /// What the subject is labelled with.
    pub metadata: BTreeMap<String, String>,
    pub data: Map<String, Value>,
}

impl Message {
    /// The body that is sent.
    pub fn body(&self) -> String {
        let mut body = json!({
            "type": self.kind,
            "timestamp": self.at.to_string(),
            "seq": self.seq,
            "metadata": self.metadata,
            "data": self.data,
        });
        body[self.subject.member()] = self.subject.id().into();
        body.to_string()
    }
}

/// A part of the log.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Taken {
    pub messages: Vec<Message>,
    /// Everything up to here was looked at.
    pub read_to: u64,
}

/// The log of events, in the order in which they are numbered.
#[async_trait]
pub trait Events: Send + Sync + 'static {
    /// The number up to which nothing can appear any more.
    async fn settled(&self) -> Result<u64, StoreError>;

    /// Up to `limit` lines after `after`, none beyond `settled`.
    async fn after(&self, after: u64, settled: u64, limit: u32) -> Result<Taken, StoreError>;

    /// Waits until something may have been written since the last call; may wait for ever.
    async fn grown(&self);
}

/// A claim on a webhook.
#[derive(Debug, Clone, Copy)]
pub struct Claim<'a> {
    /// The server that claims it.
    pub owner: &'a str,
    pub now: Timestamp,
    /// Until when the claim holds.
    pub until: Timestamp,
}

/// Outcome of a write that needs the lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fenced {
    Written,
    /// Another server has the lease, or the webhook is gone or was changed.
    Lost,
}

/// Rows of webhooks and deliveries.
#[async_trait]
pub trait WebhookStore: Send + Sync + 'static {
    /// Inserts a webhook that gets what comes after `cursor`.
    async fn insert_webhook(&self, webhook: &Webhook, cursor: u64) -> Result<(), StoreError>;

    /// Replaces a webhook if its version is still `expected`. With a cursor it goes on there, and starts with a clean record.
    async fn replace_webhook(
        &self,
        expected: u64,
        webhook: &Webhook,
        cursor: Option<u64>,
    ) -> Result<Fenced, StoreError>;

    /// Removes a webhook with its deliveries. Absent is success.
    async fn delete_webhook(&self, id: WebhookId) -> Result<(), StoreError>;

    /// One webhook, whoever's it is.
    async fn webhook(&self, id: WebhookId) -> Result<Option<(Webhook, Health)>, StoreError>;

    /// All of them, newest first.
    async fn webhooks(&self) -> Result<Vec<(Webhook, Health)>, StoreError>;

    /// Takes or keeps the lease, unless somebody else's still holds. Returns the cursor then.
    async fn claim(&self, id: WebhookId, claim: Claim<'_>) -> Result<Option<u64>, StoreError>;

    /// Gives the lease back.
    async fn release(&self, id: WebhookId, owner: &str) -> Result<(), StoreError>;

    /// Puts deliveries in and moves the cursor, together, if the lease is `owner`'s, the webhook's version still `version` and the cursor
    /// `expected`.
    async fn enqueue(
        &self,
        (id, version): (WebhookId, u64),
        owner: &str,
        (expected, cursor): (u64, u64),
        deliveries: &[Delivery],
    ) -> Result<Fenced, StoreError>;

    /// Replaces a pending delivery and what is known of the receiver, if the lease is `owner`'s and the delivery was not abandoned.
    async fn record(
        &self,
        id: WebhookId,
        owner: &str,
        delivery: &Delivery,
        health: &Health,
    ) -> Result<Fenced, StoreError>;

    /// Ends every pending delivery of a webhook as dead.
    async fn abandon(&self, id: WebhookId, now: Timestamp) -> Result<u64, StoreError>;

    /// What is to be sent, in the order of the log.
    async fn pending(&self, id: WebhookId) -> Result<Vec<Delivery>, StoreError>;

    /// The newest deliveries, newest first; of one state, or of any.
    async fn deliveries(
        &self,
        id: WebhookId,
        state: Option<&str>,
        limit: u32,
    ) -> Result<Vec<Delivery>, StoreError>;

    /// Forgets deliveries that ended before `before`, and of each webhook all but the newest `keep`.
    async fn prune_deliveries(&self, before: Timestamp, keep: u32) -> Result<u64, StoreError>;
}

/// One HTTP request to a receiver.
#[derive(Debug, Clone)]
pub struct Request {
    pub url: String,
    pub id: String,
    /// Seconds.
    pub timestamp: i64,
    pub signatures: String,
    pub body: String,
}

/// What the receiver answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    pub status: u16,
    /// When it wants to hear again.
    pub retry_after: Option<Duration>,
}

impl Sent {
    /// Any status between 200 and 299.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }
}

/// Why there was no answer. Names no address beyond the receiver's own.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    #[error("the receiver may not be called: {0}")]
    Refused(String),
    #[error("no connection to the receiver: {0}")]
    Connect(String),
    #[error("no answer in time")]
    TimedOut,
    #[error("the connection broke: {0}")]
    Broken(String),
}

/// The way to receivers.
#[async_trait]
pub trait Sender: Send + Sync + 'static {
    /// Sends one request; bounded in time.
    async fn send(&self, request: &Request) -> Result<Sent, SendError>;
}
