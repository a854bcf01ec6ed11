//! How a port of a sandbox is reached: directly, or through its agent when the program listens inside only.
//!
//! Remembers briefly which ports needed the agent, to save the refused connection; forgetting is always safe.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use sandglass_proxy::{ConnectError, Forwarder, Lease};

use super::carrier::Way;
use super::lookup::Mapped;
use super::{AGENT_PORT, EGRESS_PORT, HTTP_PORT};

/// Long enough for a page and what it loads; short enough that a program that starts to listen openly is found.
const REMEMBERED: Duration = Duration::from_secs(5);
/// Beyond this many, old entries are dropped.
const CROWDED: usize = 1024;

/// What kind of connection a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Need {
    Shared,
    Own,
}

#[derive(Debug, Default)]
pub(crate) struct Ways {
    through_agent: Mutex<HashMap<SocketAddr, Instant>>,
    /// Whether anything was ever remembered. Where nothing was, requests do not wait for each other to learn it.
    any: AtomicBool,
}

impl Ways {
    fn known(&self) -> MutexGuard<'_, HashMap<SocketAddr, Instant>> {
        self.through_agent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) async fn connect(
        &self,
        forwarder: &Forwarder,
        application: SocketAddr,
        need: Need,
    ) -> Result<(Lease, Way), ConnectError> {
        if application.port() == AGENT_PORT {
            return Ok((open(forwarder, application, need).await?, Way::Direct));
        }
        let agent = SocketAddr::new(application.ip(), AGENT_PORT);
        let needed_agent = self.needed_agent(application);
        if !needed_agent {
            match open(forwarder, application, need).await {
                Err(ConnectError::Refused) => {}
                other => return Ok((other?, Way::Direct)),
            }
        }
        let lease = open(forwarder, agent, need).await?;
        if !needed_agent {
            self.remember(application);
        }
        Ok((lease, Way::Agent))
    }

    fn needed_agent(&self, application: SocketAddr) -> bool {
        self.any.load(Ordering::Acquire)
            && self.known().get(&application).is_some_and(|since| since.elapsed() < REMEMBERED)
    }

    fn remember(&self, application: SocketAddr) {
        let mut known = self.known();
        if known.len() >= CROWDED {
            known.retain(|_, since| since.elapsed() < REMEMBERED);
        }
        if known.len() < CROWDED {
            known.insert(application, Instant::now());
            self.any.store(true, Ordering::Release);
        }
    }

    /// Nothing listens inside either: look again next time.
    pub(super) fn forget_port(&self, application: SocketAddr) {
        self.known().remove(&application);
    }

    /// Another sandbox may get this address.
    pub(super) fn forget(&self, address: IpAddr) {
        self.known().retain(|application, _| application.ip() != address);
    }
}

impl Mapped {
    /// Which port of the host leads to a port of the sandbox, and who takes the request there. 0 when none does.
    pub(super) fn door(self, port: u16) -> (u16, Way) {
        match (port, self.egress) {
            (AGENT_PORT, _) => (self.agent, Way::Direct),
            (HTTP_PORT, _) => (self.http, Way::Direct),
            (EGRESS_PORT, Some(egress)) => (egress, Way::Direct),
            _ => (self.agent, Way::Agent),
        }
    }
}

pub(super) async fn open(
    forwarder: &Forwarder,
    target: SocketAddr,
    need: Need,
) -> Result<Lease, ConnectError> {
    match need {
        Need::Shared => forwarder.connect(target).await,
        Need::Own => forwarder.dial(target).await,
    }
}
