//! What the plane asks of the kernel. One implementation talks to it, tests have another that only remembers.

use std::io;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crate::firewall::{Connection, Firewall, Plan};
use crate::intercept::Interceptor;

/// The kernel, as far as we use it.
pub trait Enforcer: Send {
    /// Puts these rules in place of the present ones, in one step. On an error the present ones stay.
    fn apply(&mut self, plan: &Plan) -> io::Result<()>;

    /// Opens addresses for a while.
    fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()>;

    /// Ends the connections that may not stay, those that go through the interceptor too. The gates ask the new rules already.
    fn cut(&mut self, may_stay: &dyn Fn(&Connection) -> bool) -> io::Result<usize>;
}

/// The kernel's rules, and the interceptor that has taken over some of the connections.
pub struct Kernel {
    pub firewall: Firewall,
    /// There is none before the first rules are in force.
    pub interceptor: Arc<OnceLock<Interceptor>>,
}

impl Enforcer for Kernel {
    fn apply(&mut self, plan: &Plan) -> io::Result<()> {
        self.firewall.apply(plan)
    }

    fn admit(&mut self, addresses: &[(IpAddr, Duration)]) -> io::Result<()> {
        self.firewall.admit(addresses)
    }

    fn cut(&mut self, may_stay: &dyn Fn(&Connection) -> bool) -> io::Result<usize> {
        let ended = self.firewall.cut(may_stay)?;
        Ok(ended + self.interceptor.get().map_or(0, Interceptor::recheck))
    }
}
