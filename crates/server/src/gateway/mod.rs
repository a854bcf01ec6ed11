//! The gateway: a proxy in front of many sandboxes, which it tells apart by host name, header or path.
//!
//! Owns the order of its checks, its answers and its rules for headers, all of them the published ones. Does not own what is known of
//! sandboxes ([`Directory`]), how routes are written and signed (`sandglass-ingress`), nor how a sandbox is connected to
//! ([`crate::ingress`]). Runs within the server or alone, as `sandglass ingress`.
//!
//! Invariant: a request is counted as use, and wakes a sandbox, only after it has passed the check of access.

mod audit;
mod directory;
mod edits;
mod feed;
mod handler;
mod intents;
mod mirror;
mod queue;
mod refused;
mod serving;
mod standalone;

pub use crate::ingress::Park;
pub use audit::{Audit, AuditSettings};
pub use directory::{Directory, InProcess, Used};
pub use handler::{Gateway, GatewaySettings, RouteFrom};
pub use intents::{IntentSettings, Intents, RedisList};
pub use mirror::Mirror;
pub use reqwest::Url;
pub use sandglass_ingress::{Generation, Keys};
pub use serving::{Door, GatewayLimits, carrier};
pub use standalone::{Options, RunError, run};

#[cfg(test)]
mod tests;
