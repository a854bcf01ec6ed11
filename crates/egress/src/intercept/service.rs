//! The listener and the connections that are alive.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, getrlimit, setrlimit};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::{AbortHandle, JoinSet};

use crate::audit::Audit;
use crate::policy::{Resolved, Rules};
use crate::vault::{Lent, Scheme};

use super::authority::Authority;
use super::connection;
use super::judge::{Denied, Via, Wanted, judge};
use super::proxy::UpstreamProxy;
use super::room::Room;
use super::trust::Trust;
use super::way::Way;
use super::{MAX_CONNECTIONS, MAX_HELD};

/// What an interceptor is made of.
pub struct Parts {
    pub rules: Arc<dyn Rules>,
    pub resolved: Arc<dyn Resolved>,
    pub audit: Arc<dyn Audit>,
    /// From [`Vault::lent`](crate::vault::Vault::lent).
    pub lent: Lent,
    pub authority: Arc<Authority>,
    pub trust: Trust,
    pub way: Arc<dyn Way>,
    pub proxy: Option<UpstreamProxy>,
    pub room: Room,
}

/// The parts, and what is bounded.
pub(super) struct Shared {
    pub(super) rules: Arc<dyn Rules>,
    pub(super) resolved: Arc<dyn Resolved>,
    pub(super) audit: Arc<dyn Audit>,
    pub(super) lent: Lent,
    pub(super) authority: Arc<Authority>,
    pub(super) trust: Trust,
    pub(super) way: Arc<dyn Way>,
    pub(super) proxy: Option<UpstreamProxy>,
    pub(super) room: Room,
    /// For bodies that are held, at most [`MAX_HELD`] at a time.
    pub(super) held: Arc<Semaphore>,
}

impl Shared {
    /// Whether it may go there, the way that this interceptor goes.
    pub(super) fn judge(&self, resolved: &dyn Resolved, wanted: Wanted<'_>) -> Result<(), Denied> {
        let via = if self.proxy.is_some() { Via::Proxy } else { Via::Address };
        judge(&*self.rules, resolved, wanted, via)
    }
}

/// What one connection is for at this moment.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<Purpose>);

#[derive(Clone, Debug, Default)]
struct Purpose {
    destination: Option<SocketAddr>,
    target: Target,
    undecrypted: bool,
}

/// What a connection has been judged for.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
enum Target {
    /// It has not said anything yet, and nothing was passed on.
    #[default]
    Undecided,
    Name(String),
    /// The address that it goes to: it has named no other host.
    Address,
}

impl Live {
    /// To be called before it is judged, so that no change of the rules comes in between unnoticed.
    pub(super) fn wants(&self, name: Option<&str>) {
        self.lock().target = name.map_or(Target::Address, |name| Target::Name(name.to_owned()));
    }

    pub(super) fn goes_to(&self, destination: SocketAddr) {
        self.lock().destination = Some(destination);
    }

    /// Nothing can be lent on it.
    pub(super) fn passes_undecrypted(&self) {
        self.lock().undecrypted = true;
    }

    fn lock(&self) -> MutexGuard<'_, Purpose> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Connections that exist were judged with what the resolver had seen then; that it has expired since ends none of them.
struct Led;

impl Resolved for Led {
    fn leads_to(&self, _: &str, _: IpAddr) -> bool {
        true
    }
}

type Connections = HashMap<u64, (Arc<Live>, AbortHandle)>;

/// Takes redirected connections. Clones share them.
#[derive(Clone)]
pub struct Interceptor {
    shared: Arc<Shared>,
    connections: Arc<Mutex<Connections>>,
    /// Of the last connection, whichever listener it came by.
    number: Arc<AtomicU64>,
}

impl fmt::Debug for Interceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Interceptor").finish_non_exhaustive()
    }
}

impl Interceptor {
    #[must_use]
    pub fn new(parts: Parts) -> Self {
        let Parts { rules, resolved, audit, lent, authority, trust, way, proxy, room } = parts;
        let held = Arc::new(Semaphore::new(MAX_HELD));
        let shared =
            Arc::new(Shared { rules, resolved, audit, lent, authority, trust, way, proxy, room, held });
        Self { shared, connections: Arc::default(), number: Arc::default() }
    }

    /// Serves until it is dropped, which ends every connection. The listener must not be reachable other than by redirection.
    pub async fn serve(&self, listener: TcpListener) {
        allow_descriptors();
        let mut tasks: JoinSet<u64> = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                Some(ended) = tasks.join_next(), if !tasks.is_empty() => {
                    self.forget(ended.ok());
                    continue;
                }
                accepted = listener.accept(), if tasks.len() < MAX_CONNECTIONS => accepted,
            };
            let Ok((stream, _)) = accepted else {
                // No descriptors or no memory: others have to end first.
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            };
            let number = self.number.fetch_add(1, Ordering::Relaxed);
            let (live, shared) = (Arc::new(Live::default()), Arc::clone(&self.shared));
            let task = {
                let live = Arc::clone(&live);
                async move {
                    connection::handle(shared, stream, live).await;
                    number
                }
            };
            let handle = tasks.spawn(task);
            self.live().insert(number, (live, handle));
        }
    }

    /// To be called after the rules or the vault have changed: ends the connections that the rules no longer allow, and those on which
    /// credentials would have to be lent by now but cannot. Says how many.
    pub fn recheck(&self) -> usize {
        let lent = self.shared.lent.now().ok().flatten();
        let mut cut = 0;
        for (live, handle) in self.live().values() {
            let Purpose { destination, target, undecrypted } = live.lock().clone();
            let Some(destination) = destination else { continue };
            let name = match &target {
                // It will be judged when it says something.
                Target::Undecided => continue,
                Target::Name(name) => Some(name.as_str()),
                Target::Address => None,
            };
            let wanted = Wanted { name, address: destination.ip().to_canonical(), port: destination.port() };
            let allowed = self.shared.judge(&Led, wanted).is_ok();
            let bound = undecrypted
                && destination.port() == Scheme::Https.port()
                && matches!((&lent, name), (Some(lent), Some(name)) if lent.covers(Scheme::Https, name));
            if !allowed || bound {
                handle.abort();
                cut += 1;
            }
        }
        cut
    }

    /// Connections at this moment.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.live().len()
    }

    fn forget(&self, number: Option<u64>) {
        let mut live = self.live();
        match number {
            Some(number) => drop(live.remove(&number)),
            // It was cut and did not say its number.
            None => live.retain(|_, (_, handle)| !handle.is_finished()),
        }
    }

    fn live(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Each connection takes two; the usual limit is a thousand for the whole process.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.unwrap_or(u64::MAX).min(u64::try_from(4 * MAX_CONNECTIONS).unwrap_or(u64::MAX));
    if limit.current.is_some_and(|current| current < most) {
        limit.current = Some(most);
        // Without it fewer connections are served at a time.
        let _ = setrlimit(Resource::Nofile, limit);
    }
}
