//! Outgoing webhooks.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::time::WireTime;

/// A subscription to events, as it is asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WebhookRequest {
    /// Where messages are sent to, at most 2048 characters. `http` only for receivers on the server's machine, unless configured otherwise.
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    /// Types such as `sandbox.failed`, or families such as `image_build.*`; everything when empty. At most 64.
    #[serde(default)]
    pub events: Vec<String>,
    /// Labels that the sandbox or image build must have. At most 64.
    #[serde(default)]
    pub metadata: BTreeMap<String, String>,
    /// `whsec_` and the base64 of 24 to 64 bytes. Made up by the server when absent; kept as it is in a change. Write-only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    /// What happens while it is disabled is not sent, also not later.
    #[serde(default = "yes")]
    pub enabled: bool,
}

fn yes() -> bool {
    true
}

/// A webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct Webhook {
    pub id: String,
    pub url: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
    pub events: Vec<String>,
    pub metadata: BTreeMap<String, String>,
    pub enabled: bool,
    /// `asked`, `failing` (nothing arrived for too long) or `gone` (the receiver answered 410).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disabled_at: Option<WireTime>,
    /// Failed attempts since the last message that arrived.
    pub consecutive_failures: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failing_since: Option<WireTime>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_delivered_at: Option<WireTime>,
    /// Only in the answer that made it, and only when the server made it up.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<String>,
    pub created_at: WireTime,
    pub updated_at: WireTime,
}

/// One attempt to deliver a message.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookAttempt {
    pub at: WireTime,
    /// What the receiver answered, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub status: Option<u16>,
    /// Why it does not count as delivered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    pub duration_ms: u64,
}

/// A message to the receiver of a webhook.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookDelivery {
    /// The header `webhook-id`: the same for every attempt.
    pub message_id: String,
    #[serde(rename = "type")]
    pub kind: String,
    /// The event's sequence.
    pub seq: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sandbox_id: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_build_id: Option<String>,
    /// `Pending`, `Delivered` or `Dead`.
    pub state: String,
    /// How many there were; the latest ten are listed.
    pub attempt_count: u32,
    /// Oldest first.
    pub attempts: Vec<WebhookAttempt>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub next_attempt_at: Option<WireTime>,
    pub created_at: WireTime,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub finished_at: Option<WireTime>,
}

/// The newest deliveries of a webhook, newest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WebhookDeliveries {
    pub items: Vec<WebhookDelivery>,
}

/// What a test came to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct WebhookTest {
    pub message_id: String,
    /// Whether the receiver answered with a status between 200 and 299.
    pub delivered: bool,
    pub attempt: WebhookAttempt,
}
