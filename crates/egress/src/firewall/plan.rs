//! What the rules are made from.

use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use ipnet::IpNet;

use crate::policy::Action;

/// Where this program stands between the sandbox and the network.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// In a namespace of its own that forwards between the box and the host. No IPv6 passes.
    Gateway {
        /// The interface towards the box.
        down: String,
        /// The interface towards the host.
        up: String,
        /// This program's own address on `up`, which the host never sees.
        own: Ipv4Addr,
        /// The box's address.
        boxed: Ipv4Addr,
    },
    /// In the same namespace as the box, which has neither `CAP_NET_ADMIN` nor `CAP_NET_RAW`.
    Shared {
        /// The mark of this program's own packets: every socket that it opens towards the network has it.
        mark: u32,
    },
}

/// Where the parts of this program listen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ports {
    /// The DNS gate, UDP and TCP.
    pub dns: u16,
    /// The gate for HTTP and intercepted TLS.
    pub gate: u16,
    /// The control API.
    pub control: u16,
}

impl Default for Ports {
    fn default() -> Self {
        Self { dns: 15353, gate: 18081, control: 18080 }
    }
}

/// Whether rules about names exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameGate {
    /// Addresses alone decide.
    Off,
    /// By default nothing passes: addresses of allowed names pass after inspection. By default everything passes: all
    /// addresses but those of allow rules are inspected, because any of them may be a denied name's.
    On,
}

/// What becomes of DNS over HTTPS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Doh {
    /// What the other rules say.
    Pass,
    /// Port 443 of these is refused.
    Refuse(Vec<IpNet>),
    /// Port 443 is refused everywhere.
    RefuseEverywhere,
}

/// Everything that the kernel has to know about a policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub default: Action,
    /// Rules about addresses; a denial wins over an allowance whatever their order.
    pub networks: Vec<(Action, IpNet)>,
    pub names: NameGate,
    /// TCP ports, some thousand at most, whose connections go to the gate whenever their address may be reached at all.
    /// UDP 443 is refused while 443 is among them, so that nothing goes round the gate by HTTP/3.
    pub intercept: Vec<u16>,
    /// TCP ports whose connections go to the gate only where the address may be reached by name, not where an allow
    /// rule for the address covers it.
    pub named_http: Vec<u16>,
    /// Addresses of allowed names that are known already, and how long they stay admitted.
    pub dynamic: Vec<(IpAddr, Duration)>,
    /// Resolvers that the box may ask itself: their port 53 passes and does not go to the DNS gate.
    pub dns_exempt: Vec<IpAddr>,
    pub doh: Doh,
}

impl Plan {
    /// Nothing passes but DNS questions, to the gate.
    pub fn deny_all() -> Self {
        Self {
            default: Action::Deny,
            networks: Vec::new(),
            names: NameGate::Off,
            intercept: Vec::new(),
            named_http: Vec::new(),
            dynamic: Vec::new(),
            dns_exempt: Vec::new(),
            doh: Doh::Pass,
        }
    }
}
