//! What the ingress asks about sandboxes.

use std::fmt;
use std::net::IpAddr;

use futures_util::FutureExt;
use sandglass_sandbox::ports::runtime::Exposure;

use super::wake::{NotWoken, Waking};

/// Where a sandbox is and what opens it.
#[derive(Clone)]
pub struct Target {
    pub reach: Reach,
    /// How clients get there without the server.
    pub exposure: Exposure,
    /// When given, the server itself goes through these ports of [`Reach`]'s address instead of the sandbox's own.
    pub mapped: Option<Mapped>,
    /// What the agent in the sandbox asks for; empty when it asks for nothing.
    pub agent_token: String,
    /// What opens the proxy routes of this sandbox; empty when only the API key does.
    pub route_token: String,
    /// What its egress enforcer asks for, if it has one.
    pub egress_token: Option<String>,
    /// The sandbox was created with `secureAccess`: no request passes without the route token, whatever else is open.
    pub secure_access: bool,
    /// A gateway asks for nothing, unless the sandbox was created with `secureAccess`.
    pub open: bool,
    /// While it is paused, requests resume it and wait.
    pub wakes: bool,
    /// Use extends its life, or keeps it from becoming idle: what goes on is reported, too.
    pub renews: bool,
    /// Whose it is; `None` on a server without tenants.
    pub tenant: Option<String>,
}

#[cfg(test)]
impl Target {
    /// A sandbox with an address of its own, for tests.
    pub(crate) fn at(reach: Reach) -> Self {
        Self {
            reach,
            exposure: Exposure::Address,
            mapped: None,
            agent_token: "agent".to_owned(),
            route_token: "route".to_owned(),
            egress_token: None,
            secure_access: false,
            open: false,
            wakes: false,
            renews: false,
            tenant: None,
        }
    }
}

/// Ports of the host that lead into a sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapped {
    /// To the agent, which relays to every port.
    pub agent: u16,
    /// To port 8080.
    pub http: u16,
    pub egress: Option<u16>,
}

/// Tokens stay out of logs.
impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Target")
            .field("reach", &self.reach)
            .field("exposure", &self.exposure)
            .field("mapped", &self.mapped)
            .field("secure_access", &self.secure_access)
            .finish_non_exhaustive()
    }
}

/// Whether a connection makes sense, and to where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    Addressable(IpAddr),
    /// Frozen, or about to be or to be thawed: connections would be accepted by the kernel and not answered.
    Paused(IpAddr),
    /// Not up yet; the address when it is already known.
    Starting(Option<IpAddr>),
    /// Up, but neither an address nor a port of the host leads to it.
    Nowhere,
    /// Over, though its record still exists.
    Gone,
}

/// Answers from memory: asked for every proxied request.
pub trait Lookup: Send + Sync {
    /// `None` when there is no such sandbox.
    fn target(&self, id: &str) -> Option<Target>;

    /// Whether a sandbox that is not known is known not to exist. Not so while the runtime cannot be reached.
    fn complete(&self) -> bool {
        true
    }

    /// A request that was admitted used this sandbox; for renewal on access and for its idle clock.
    fn used(&self, _id: &str) {}

    /// A use that was reported before goes on: bytes move on a connection of it. Whoever does not tell the two apart takes it for one more use.
    fn lasts(&self, id: &str) {
        self.used(id);
    }

    /// Resumes a paused sandbox. Done when it runs or is known not to; a pause that is under way comes to its end first.
    fn wake(&self, _id: &str) -> Waking {
        std::future::ready(Err(NotWoken::Later)).boxed()
    }
}
