//! Connections to backends, kept by address while unused.
//!
//! The invariant: after `forget(address)` no request uses a connection opened before it, and whatever was in flight on
//! one is cut. Addresses are given to other machines later, and a removed machine never says goodbye.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use hyper::client::conn::http1::{self, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::body::RequestBody;
use crate::error::ConnectError;
use crate::limits::Limits;

/// One open connection that carries no request, or one.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) sender: SendRequest<RequestBody>,
    pub(crate) target: SocketAddr,
    /// Cancelled when the target is forgotten.
    pub(crate) cut: CancellationToken,
    pub(crate) reused: bool,
}

#[derive(Debug)]
struct Idle {
    sender: SendRequest<RequestBody>,
    since: Instant,
}

#[derive(Debug)]
struct Host {
    cut: CancellationToken,
    idle: HashMap<u16, Vec<Idle>>,
}

#[derive(Debug, Default)]
struct State {
    hosts: HashMap<IpAddr, Host>,
    reaping: bool,
}

#[derive(Debug)]
pub(crate) struct Pool {
    limits: Limits,
    state: Mutex<State>,
    /// Parent of every host's token.
    shutdown: CancellationToken,
    pub(crate) tasks: TaskTracker,
}

impl Pool {
    pub(crate) fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self {
            limits,
            state: Mutex::default(),
            shutdown: CancellationToken::new(),
            tasks: TaskTracker::new(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Every critical section leaves the maps consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The most recently used open connection: the one that the backend is least likely to close.
    pub(crate) fn take(&self, target: SocketAddr) -> Option<Connection> {
        let mut state = self.state();
        let host = state.hosts.get_mut(&target.ip())?;
        let idle = host.idle.get_mut(&target.port())?;
        while let Some(Idle { sender, since }) = idle.pop() {
            if sender.is_ready() && since.elapsed() < self.limits.idle {
                return Some(Connection { sender, target, cut: host.cut.clone(), reused: true });
            }
        }
        None
    }

    /// Opens a connection.
    pub(crate) async fn dial(&self, target: SocketAddr) -> Result<Connection, ConnectError> {
        let cut = self.token(target.ip());
        let stream = tokio::select! {
            connected = tokio::time::timeout(self.limits.connect, TcpStream::connect(target)) => {
                connected.map_err(|_| ConnectError::Timeout)??
            }
            () = cut.cancelled() => return Err(ConnectError::Removed),
        };
        stream.set_nodelay(true)?;
        let (sender, connection) = http1::Builder::new()
            .handshake(TokioIo::new(stream))
            .await
            .map_err(|error| ConnectError::Unreachable(std::io::Error::other(error)))?;
        let driver_cut = cut.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                ended = connection.with_upgrades() => {
                    if let Err(error) = ended {
                        tracing::debug!(%target, %error, "backend connection ended");
                    }
                }
                () = driver_cut.cancelled() => {}
            }
        });
        Ok(Connection { sender, target, cut, reused: false })
    }

    fn token(&self, address: IpAddr) -> CancellationToken {
        let fresh = || Host { cut: self.shutdown.child_token(), idle: HashMap::new() };
        self.state().hosts.entry(address).or_insert_with(fresh).cut.clone()
    }

    /// Keeps a connection for the next request as soon as the current exchange has ended.
    pub(crate) fn give_back(self: &Arc<Self>, connection: Connection) {
        let Connection { mut sender, target, cut, .. } = connection;
        if sender.is_ready() {
            return self.keep(sender, target, &cut);
        }
        let pool = Arc::downgrade(self);
        self.tasks.spawn(async move {
            if sender.ready().await.is_ok()
                && let Some(pool) = pool.upgrade()
            {
                pool.keep(sender, target, &cut);
            }
        });
    }

    fn keep(self: &Arc<Self>, sender: SendRequest<RequestBody>, target: SocketAddr, cut: &CancellationToken) {
        let mut state = self.state();
        if cut.is_cancelled() || sender.is_closed() {
            return;
        }
        let Some(host) = state.hosts.get_mut(&target.ip()) else { return };
        let idle = host.idle.entry(target.port()).or_default();
        if idle.len() < self.limits.idle_per_target {
            idle.push(Idle { sender, since: Instant::now() });
        }
        if !std::mem::replace(&mut state.reaping, true) {
            let (pool, shutdown) = (Arc::downgrade(self), self.shutdown.clone());
            self.tasks.spawn(reap(pool, shutdown, self.limits.idle));
        }
    }

    /// Closes what was unused for too long; false when nothing is left to watch.
    fn sweep(&self) -> bool {
        let mut state = self.state();
        let limit = self.limits.idle;
        for host in state.hosts.values_mut() {
            host.idle.retain(|_, idle| {
                idle.retain(|entry| !entry.sender.is_closed() && entry.since.elapsed() < limit);
                !idle.is_empty()
            });
        }
        state.reaping = state.hosts.values().any(|host| !host.idle.is_empty());
        state.reaping
    }

    pub(crate) fn forget(&self, address: IpAddr) {
        let host = self.state().hosts.remove(&address);
        if let Some(host) = host {
            host.cut.cancel();
        }
    }

    /// Cuts every connection and waits until their tasks have ended.
    pub(crate) async fn close(&self) {
        self.shutdown.cancel();
        self.state().hosts.clear();
        self.tasks.close();
        self.tasks.wait().await;
    }
}

/// Runs while there are unused connections.
async fn reap(pool: Weak<Pool>, shutdown: CancellationToken, period: Duration) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(period) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(pool) = pool.upgrade() else { return };
        if !pool.sweep() {
            return;
        }
    }
}
