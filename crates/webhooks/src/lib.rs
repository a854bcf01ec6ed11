//! Outgoing webhooks: events of sandboxes and image builds, sent to receivers that subscribed to them.
//!
//! Owns what a subscription is ([`Webhook`]), which receivers may be called ([`Receivers`]), how a message is signed
//! ([`SigningSecret`]), when it is tried again ([`pace`]), and the driver that sends ([`Couriers`]). Does not own rows or the log of
//! events: these are ports. Knows neither routes nor configuration.
//!
//! ```text
//!   log of events ──► courier of a webhook ──► deliveries (rows) ──► receiver
//!                     one task each, leased       per subject in order
//! ```
//!
//! Invariants: what is to be sent is a row before it is sent, in one transaction with the place in the log up to which rows exist; of one
//! subject one delivery at a time is under way, in the order of the log; nothing is written without the lease on the webhook.

mod address;
mod courier;
mod http_sender;
pub mod pace;
mod ports;
mod record;
mod secret;
mod selection;

pub use address::{ReceiverError, Receivers};
pub use courier::{Couriers, Settings, Tested};
pub use http_sender::{ClientError, HttpSender};
pub use ports::{
    Claim, Events, Fenced, Message, Owner, Request, SendError, Sender, Sent, Subject, Taken, WebhookStore,
};
pub use record::{Attempt, Delivery, DeliveryState, Health, Status, Webhook, Why};
pub use secret::{HmacSha256, SecretError, SigningSecret, hmac_sha256};
pub use selection::{EVENT_FAMILIES, Selection, SelectionError};
