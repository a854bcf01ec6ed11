//! What the plane asks of the kernel. One implementation talks to it, tests have another that only remembers.

use std::io;
use std::net::IpAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::policy::Action;
use crate::settings::Doh;

/// What the kernel is to enforce, complete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    pub default: Action,
    pub networks: Vec<(Action, IpNet)>,
    pub names: NameGate,
    /// TCP ports whose connections go to the interceptor.
    pub intercept: Vec<u16>,
    /// Addresses that names have led to and that stay open, for so long.
    pub dynamic: Vec<(IpAddr, Duration)>,
    pub dns_exempt: Vec<IpAddr>,
    pub doh: Doh,
}

/// How far names decide about connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NameGate {
    /// Not at all: addresses decide alone.
    Unused,
    /// Addresses that names led to are open, and what goes there is looked into.
    Listed,
    /// Some names are denied and the rest is open: every connection is looked into.
    Everything,
}

/// A connection that the kernel tracks: where the sandbox meant it to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    pub address: IpAddr,
    pub port: u16,
}

/// The kernel, as far as we use it.
pub trait Enforcer: Send {
    /// Puts these rules in place of the present ones, in one step. On an error the present ones stay.
    fn apply(&mut self, plan: &Plan) -> io::Result<()>;

    /// Opens addresses for a while.
    fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()>;

    /// Ends the connections that may not stay.
    fn cut(&mut self, may_stay: &dyn Fn(&Flow) -> bool) -> io::Result<usize>;
}
