//! The way from the API's proxy routes to a port of a sandbox.
//!
//! Owns the routes' grammar, who may use them, which headers travel, and what an endpoint look-up answers. Does not own
//! what is known about sandboxes ([`Lookup`]) nor the bytes (`sandglass-proxy`).
//!
//! Invariant: the server's key and the tokens of one sandbox never reach an application, and never another sandbox.

mod access;
mod carrier;
mod edits;
mod endpoints;
mod lookup;
mod minting;
mod policy;
pub mod public_host;
mod refusal;
mod relay;
mod route;
mod tunnel;
mod visits;
mod wake;
mod ways;
mod websocket;

pub use access::AccessRules;
pub(crate) use access::presents;
pub use carrier::{Carrier, Way};
pub(crate) use edits::Observed;
pub use endpoints::{
    Checked, EndpointAnswer, EndpointQuery, Vantage, answer as answer_endpoint, check as check_endpoint,
};
pub use lookup::{Lookup, Mapped, Reach, Target};
pub use minting::Minting;
pub use policy::PolicyRequest;
pub use refusal::Refusal;
pub use relay::{IngressSettings, IngressState, answer, proxy_handler};
pub(crate) use relay::{USE_LASTS, skips_renewal, wants_awake};
pub use route::Mount;
pub use tunnel::Tunnelled;
pub use visits::{Invitation, invite};
pub(crate) use wake::Wakes;
pub use wake::{NotWoken, Park, Waking};
pub(crate) use ways::Need;

use http::HeaderName;

/// Where the agent listens in every sandbox.
pub const AGENT_PORT: u16 = 44772;

/// The port that sandboxes have of their own where ports are published.
pub const HTTP_PORT: u16 = 8080;
/// Where the egress enforcer listens in sandboxes that have one.
pub const EGRESS_PORT: u16 = 18080;

/// The agent's own token.
pub const AGENT_TOKEN: HeaderName = HeaderName::from_static("x-execd-access-token");
/// The server's key.
pub const API_KEY: HeaderName = HeaderName::from_static("open-sandbox-api-key");
/// A sandbox's route token.
pub const ROUTE_TOKEN: HeaderName = HeaderName::from_static("x-sandglass-access");
/// A sandbox's route token, under the name that published clients know.
pub const SECURE_ACCESS: HeaderName = HeaderName::from_static("opensandbox-secure-access");
/// An egress enforcer's token.
pub const EGRESS_TOKEN: HeaderName = HeaderName::from_static("opensandbox-egress-auth");
/// `skip` keeps a request from extending the sandbox's life.
pub const ACCESS_RENEW: HeaderName = HeaderName::from_static("opensandbox-access-renew");

#[cfg(test)]
mod front_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod visit_tests;
