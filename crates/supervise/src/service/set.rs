//! All services of a box.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinHandle;

use super::definition::ServiceDefinition;
use super::keeper::{Ask, Keeper, Shared, Standing};
use super::machine::{Input, Refused};
use super::restart::Backoff;
use super::snapshot::ServiceSnapshot;
use super::state::State;
use crate::clock::Moment;
use crate::plan::PlanError;
use crate::ports::Ports;
use crate::report::Failure;

/// Why a request for a service was not carried out.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ServiceError {
    #[error("there is no service \"{0}\"")]
    NotFound(String),
    #[error("service \"{name}\" is {state:?}: enable it first")]
    Disabled { name: String, state: State },
    #[error("there is a service \"{0}\" already")]
    Exists(String),
    #[error("port {port} is the port of service \"{name}\" already")]
    PortTaken { port: u16, name: String },
    #[error(transparent)]
    Invalid(#[from] PlanError),
    #[error("the box is ending, and its services with it")]
    Ending,
}

impl ServiceError {
    /// Stable, for those who decide by it.
    pub fn code(&self) -> &'static str {
        match self {
            ServiceError::NotFound(_) => "SERVICE::NOT_FOUND",
            ServiceError::Disabled { .. } => "SERVICE::DISABLED",
            ServiceError::Exists(_) => "SERVICE::EXISTS",
            ServiceError::PortTaken { .. } => "SERVICE::PORT_CONFLICT",
            ServiceError::Invalid(_) => "SANDBOX::INVALID_PARAMETER",
            ServiceError::Ending => "SANDBOX::INVALID_STATE",
        }
    }
}

/// What the services say about the box.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Health {
    Healthy,
    /// These were given up; the box works without them.
    Degraded {
        services: Vec<String>,
    },
    /// Without this one it does not.
    Failed(Box<Failure>),
}

/// The services; clones are the same ones. They end with [`Services::stop_all`]; when the last clone goes without it, each ends within its
/// own grace.
#[derive(Clone)]
pub struct Services {
    inner: Arc<Inner>,
}

struct Inner {
    ports: Ports,
    backoff: Backoff,
    shared: Arc<Shared>,
    entries: Mutex<Entries>,
    /// Held while everything is stopped, so that a second request to stop waits for the first.
    stopping: tokio::sync::Mutex<()>,
}

#[derive(Default)]
struct Entries {
    list: Vec<Entry>,
    ending: bool,
}

struct Entry {
    definition: Arc<ServiceDefinition>,
    asks: mpsc::Sender<Ask>,
    snapshot: watch::Receiver<ServiceSnapshot>,
    standing: Arc<Standing>,
    keeper: Option<JoinHandle<()>>,
}

impl Services {
    /// None yet.
    pub fn new(ports: Ports, backoff: Backoff) -> Self {
        let shared = Shared {
            changed: watch::Sender::new(ports.clock.now()),
            failures: watch::Sender::new(BTreeMap::new()),
            starts: 0.into(),
        };
        let (entries, stopping) = (Mutex::default(), tokio::sync::Mutex::new(()));
        Services { inner: Arc::new(Inner { ports, backoff, shared: Arc::new(shared), entries, stopping }) }
    }

    /// Knows one more, which does not run yet.
    pub fn add(&self, definition: ServiceDefinition) -> Result<(), ServiceError> {
        definition.check("service")?;
        let mut entries = self.entries();
        if entries.ending {
            return Err(ServiceError::Ending);
        }
        for Entry { definition: other, .. } in &entries.list {
            if other.name == definition.name {
                return Err(ServiceError::Exists(definition.name));
            }
            if let Some(port) = definition.port.filter(|_| other.port == definition.port) {
                return Err(ServiceError::PortTaken { port, name: other.name.clone() });
            }
        }
        let definition = Arc::new(definition);
        let Inner { ports, backoff, shared, .. } = &*self.inner;
        let (keeper, snapshot, standing) =
            Keeper::new(Arc::clone(&definition), ports.clone(), *backoff, Arc::clone(shared));
        let (asks, asked) = mpsc::channel(8);
        let keeper = Some(tokio::spawn(keeper.run(asked)));
        entries.list.push(Entry { definition, asks, snapshot, standing, keeper });
        Ok(())
    }

    /// Starts those that are enabled, in the order in which they were added, without waiting for one before the next.
    pub async fn start_enabled(&self) -> Result<(), ServiceError> {
        let names: Vec<String> = {
            let entries = self.entries();
            let enabled = entries.list.iter().filter(|entry| entry.definition.enabled);
            enabled.map(|entry| entry.definition.name.clone()).collect()
        };
        for name in names {
            self.start(&name).await?;
        }
        Ok(())
    }

    /// Has it run, also when it was disabled, stopped or given up; one that runs already goes on.
    pub async fn start(&self, name: &str) -> Result<(), ServiceError> {
        self.request(name, Input::Start).await
    }

    /// Ends what runs and starts it anew, with its whole budget of restarts. Returns before it is ready.
    pub async fn restart(&self, name: &str) -> Result<(), ServiceError> {
        self.request(name, Input::Restart).await
    }

    /// Ends it for now. Returns before it has ended.
    pub async fn stop(&self, name: &str) -> Result<(), ServiceError> {
        self.request(name, Input::Stop).await
    }

    /// Ends it, and refuses restarts until it is started. Returns before it has ended.
    pub async fn disable(&self, name: &str) -> Result<(), ServiceError> {
        self.request(name, Input::Disable).await
    }

    async fn request(&self, name: &str, input: Input) -> Result<(), ServiceError> {
        let asks = {
            let entries = self.entries();
            if entries.ending {
                return Err(ServiceError::Ending);
            }
            let entry = entries.list.iter().find(|entry| entry.definition.name == name);
            entry.map(|entry| entry.asks.clone()).ok_or_else(|| ServiceError::NotFound(name.to_owned()))?
        };
        let (answer, answered) = oneshot::channel();
        asks.send(Ask::Request { input, answer }).await.map_err(|_| ServiceError::Ending)?;
        let refused = |Refused { state }| ServiceError::Disabled { name: name.to_owned(), state };
        answered.await.map_err(|_| ServiceError::Ending)?.map_err(refused)
    }

    /// In the order in which they were added.
    pub fn snapshots(&self) -> Vec<ServiceSnapshot> {
        self.entries().list.iter().map(|entry| entry.snapshot.borrow().clone()).collect()
    }

    pub fn snapshot(&self, name: &str) -> Option<ServiceSnapshot> {
        let entries = self.entries();
        let entry = entries.list.iter().find(|entry| entry.definition.name == name)?;
        let snapshot = entry.snapshot.borrow().clone();
        Some(snapshot)
    }

    /// When anything last changed.
    pub fn changed(&self) -> watch::Receiver<Moment> {
        self.inner.shared.changed.subscribe()
    }

    pub fn health(&self) -> Health {
        if let Some(failure) = self.inner.shared.failures.borrow().values().next() {
            return Health::Failed(Box::new(failure.clone()));
        }
        let given_up = self.snapshots().into_iter().filter(|snapshot| snapshot.state == State::Failed);
        let services: Vec<String> = given_up.map(|snapshot| snapshot.name).collect();
        if services.is_empty() { Health::Healthy } else { Health::Degraded { services } }
    }

    /// Completes once every required service answers, has finished, or was disabled.
    pub async fn required_ready(&self) {
        let mut changed = self.changed();
        loop {
            changed.borrow_and_update();
            let waited_for = |snapshot: &ServiceSnapshot| {
                let waiting = matches!(snapshot.state, State::Starting | State::Restarting | State::Failed);
                snapshot.required && waiting
            };
            if !self.snapshots().iter().any(waited_for) || changed.changed().await.is_err() {
                return;
            }
        }
    }

    /// Completes when a required service has been given up.
    pub async fn required_failure(&self) -> Failure {
        let mut failures = self.inner.shared.failures.subscribe();
        loop {
            if let Some(failure) = failures.borrow_and_update().values().next() {
                return failure.clone();
            }
            if failures.changed().await.is_err() {
                // Cannot be: the sender lives as long as this.
                std::future::pending::<()>().await;
            }
        }
    }

    /// Those of which something runs or will.
    pub fn busy(&self) -> usize {
        self.entries().list.iter().filter(|entry| entry.standing.busy.load(Ordering::Acquire)).count()
    }

    /// Ends all of them for good, the last started one first, each asked and then killed, everything within the grace.
    pub async fn stop_all(&self, grace: Duration) {
        let clock = &self.inner.ports.clock;
        let deadline = clock.now() + grace;
        self.entries().ending = true;
        let _stopping = self.inner.stopping.lock().await;
        let mut order: Vec<(u64, Duration, mpsc::Sender<Ask>)> = {
            let entries = self.entries();
            let place = |entry: &Entry| {
                let started = entry.standing.started.load(Ordering::Acquire);
                (started, entry.definition.grace(), entry.asks.clone())
            };
            entries.list.iter().filter(|entry| entry.keeper.is_some()).map(place).collect()
        };
        for (_, _, asks) in &order {
            // Nothing comes up beside what is going down.
            let _ = asks.send(Ask::Ending).await;
        }
        order.sort_by_key(|(started, ..)| std::cmp::Reverse(*started));
        for (_, own, asks) in order {
            let now = clock.now();
            let kill_at = now + share(deadline.since(now), self.busy(), own);
            let (done, stopped) = oneshot::channel();
            if asks.send(Ask::Stop { kill_at, done }).await.is_ok() {
                let _ = stopped.await;
            }
        }
        let keepers: Vec<JoinHandle<()>> =
            self.entries().list.iter_mut().filter_map(|entry| entry.keeper.take()).collect();
        for keeper in keepers {
            // Nothing of its service is left, and nobody is listened to any more.
            keeper.abort();
            let _ = keeper.await;
        }
    }

    fn entries(&self) -> MutexGuard<'_, Entries> {
        self.inner.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How long one of `left` may take of what remains for all of them, so that each one is asked before it is killed.
pub(crate) fn share(remaining: Duration, left: usize, own: Duration) -> Duration {
    let left = u32::try_from(left).unwrap_or(u32::MAX).max(1);
    own.min(remaining / left)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_takes_the_time_of_those_who_follow() {
        let seconds = Duration::from_secs;
        assert_eq!(share(seconds(10), 5, seconds(10)), seconds(2));
        assert_eq!(share(seconds(10), 1, seconds(3)), seconds(3));
        assert_eq!(share(seconds(0), 0, seconds(3)), seconds(0));
    }
}
