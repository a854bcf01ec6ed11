//! What a gateway that runs alone knows of sandboxes: a copy of the server's knowledge.
//!
//! Invariant: the copy answers whether or not the server does. While the server is away nothing is added and nothing is forgotten, except what
//! has expired.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use sandglass_api::ingress::{IngressLine, IngressSandbox, IngressState};
use sandglass_sandbox::Timestamp;
use sandglass_sandbox::ports::runtime::Exposure;
use tokio::sync::watch;

use crate::ingress::{Carrier, Mapped, Reach, Target};

/// See the module documentation.
#[derive(Debug)]
pub struct Mirror {
    known: RwLock<HashMap<String, IngressSandbox>>,
    changed: watch::Sender<u64>,
    /// Whether everything was told at least once.
    whole: watch::Sender<bool>,
    /// Whether what is known is as the server knows it.
    fresh: AtomicBool,
    /// Where ports are published for this machine, when not where the server says.
    published_on: Option<IpAddr>,
    carrier: Carrier,
}

impl Mirror {
    #[must_use]
    pub fn new(carrier: Carrier, published_on: Option<IpAddr>) -> Self {
        Self {
            known: RwLock::default(),
            changed: watch::Sender::new(0),
            whole: watch::Sender::new(false),
            fresh: AtomicBool::new(false),
            published_on,
            carrier,
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<String, IngressSandbox>> {
        self.known.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<String, IngressSandbox>> {
        self.known.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns when everything was told.
    pub(super) async fn wait_whole(&self) {
        // The sender lives as long as this.
        let _ = self.whole.subscribe().wait_for(|whole| *whole).await;
    }

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    pub(super) fn len(&self) -> usize {
        self.read().len()
    }

    /// The stream has ended.
    pub(super) fn lost(&self) {
        self.fresh.store(false, Relaxed);
    }

    /// Takes one line of a stream. `told` are the sandboxes that this stream has told of so far.
    pub(super) fn take(&self, line: IngressLine, told: &mut HashSet<String>) {
        match line {
            IngressLine::Put { sandbox } => {
                told.insert(sandbox.id.clone());
                let before = self.write().insert(sandbox.id.clone(), sandbox.clone());
                if let Some(before) = before.filter(|before| before.address != sandbox.address) {
                    self.cut(&before);
                }
            }
            IngressLine::Gone { id } => {
                told.remove(&id);
                let before = self.write().remove(&id);
                before.iter().for_each(|before| self.cut(before));
            }
            IngressLine::Whole => {
                let left: Vec<IngressSandbox> =
                    self.write().extract_if(|id, _| !told.contains(id)).map(|(_, sandbox)| sandbox).collect();
                left.iter().for_each(|before| self.cut(before));
                self.fresh.store(true, Relaxed);
                self.whole.send_replace(true);
            }
            IngressLine::Alive => return,
        }
        self.changed.send_modify(|count| *count += 1);
    }

    /// Ends the connections to a sandbox whose address may be given to another.
    fn cut(&self, sandbox: &IngressSandbox) {
        let own = sandbox.address.filter(|address| sandbox.ports.is_none() && !address.is_loopback());
        if let Some(address) = own {
            self.carrier.forget(address);
        }
    }

    pub(super) fn find(&self, id: &str, now: Timestamp) -> Option<Target> {
        let known = self.read();
        let sandbox = known.get(id)?;
        // Nobody would have told that it is over.
        let unknown = !self.fresh.load(Relaxed) && sandbox.expires_at.is_some_and(|at| at.0 <= now);
        (!unknown).then(|| self.target(sandbox))
    }

    fn target(&self, sandbox: &IngressSandbox) -> Target {
        let published_on = self.published_on.filter(|_| sandbox.ports.is_some());
        let address = published_on.or(sandbox.address);
        let reach = match (sandbox.state, address) {
            (IngressState::Up, Some(address)) => Reach::Addressable(address),
            (IngressState::Paused, Some(address)) => Reach::Paused(address),
            (IngressState::Starting, address) => Reach::Starting(address),
            (IngressState::Over, _) => Reach::Gone,
            (IngressState::Up | IngressState::Paused | IngressState::Unreachable, _) => Reach::Nowhere,
        };
        Target {
            reach,
            exposure: Exposure::None,
            mapped: sandbox.ports.map(|p| Mapped { agent: p.agent, http: p.http, egress: p.egress }),
            agent_token: sandbox.agent_token.clone(),
            route_token: sandbox.secure_access.as_ref().unwrap_or(&sandbox.route_token).clone(),
            egress_token: None,
            secure_access: sandbox.secure_access.is_some(),
            open: sandbox.open,
            wakes: sandbox.wakes,
            renews: sandbox.renews,
            tenant: None,
        }
    }
}
