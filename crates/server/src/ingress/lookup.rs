//! What the ingress asks about sandboxes.

use std::fmt;
use std::net::IpAddr;

/// Where a sandbox is and what opens it.
#[derive(Clone)]
pub struct Target {
    pub reach: Reach,
    /// What the agent in the sandbox asks for.
    pub agent_token: String,
    /// What opens the proxy routes of this sandbox.
    pub route_token: String,
    /// The sandbox was created with `secureAccess`: no request passes without the route token, whatever else is open.
    pub secure_access: bool,
    /// Whose it is; `None` on a server without tenants.
    pub tenant: Option<String>,
}

/// Tokens stay out of logs.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("reach", &self.reach)
            .field("secure_access", &self.secure_access)
            .finish_non_exhaustive()
    }
}

/// Whether a connection makes sense, and to where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Addressable(IpAddr),
    /// Frozen: connections would be accepted by the kernel and never answered.
    Paused(IpAddr),
    /// Not up yet; the address when it is already known.
    Starting(Option<IpAddr>),
    /// Over, though its record still exists.
    Gone,
}

/// Answers from memory: asked for every proxied request.
pub trait Lookup: Send + Sync {
    /// `None` when there is no such sandbox.
    fn target(&self, id: &str) -> Option<Target>;

    /// A request that was admitted used this sandbox; for renewal on access.
    fn used(&self, _id: &str) {}
}
