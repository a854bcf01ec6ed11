//! Connections to backends, kept by address while unused.
//!
//! The invariant: after `forget(address)` no request uses a connection opened before it, and whatever was in flight on
//! one is cut. Addresses are given to other machines later, and a removed machine never says goodbye.

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Context;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};
use tokio_util::task::TaskTracker;

use crate::alarm::Alarm;
use crate::error::ConnectError;
use crate::limits::Limits;
use crate::wire::Wire;

/// One open connection that carries no request, or one.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) wire: Wire,
    pub(crate) target: SocketAddr,
    pub(crate) cut: Cut,
    pub(crate) alarm: Alarm,
    pub(crate) reused: bool,
}

/// Says when the target is forgotten. One wait lasts for all exchanges of a connection.
pub(crate) struct Cut {
    pub(crate) token: CancellationToken,
    cancelled: Pin<Box<WaitForCancellationFutureOwned>>,
}

impl fmt::Debug for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cut").field(&self.token.is_cancelled()).finish()
    }
}

impl Cut {
    fn new(token: CancellationToken) -> Self {
        let cancelled = Box::pin(token.clone().cancelled_owned());
        Self { token, cancelled }
    }

    /// Whether it has happened; wakes the caller when it does.
    pub(crate) fn poll(&mut self, cx: &mut Context<'_>) -> bool {
        self.cancelled.as_mut().poll(cx).is_ready()
    }
}

#[derive(Debug)]
struct Idle {
    connection: Connection,
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
        let idle = state.hosts.get_mut(&target.ip())?.idle.get_mut(&target.port())?;
        while let Some(Idle { connection, since }) = idle.pop() {
            if since.elapsed() < self.limits.idle && connection.wire.is_quiet() {
                return Some(connection);
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
        // Of this connection alone: it is asked with every exchange, which must not make the others wait.
        let cut = Cut::new(cut.child_token());
        Ok(Connection { wire: Wire::new(stream), target, cut, alarm: Alarm::default(), reused: false })
    }

    fn token(&self, address: IpAddr) -> CancellationToken {
        let fresh = || Host { cut: self.shutdown.child_token(), idle: HashMap::new() };
        self.state().hosts.entry(address).or_insert_with(fresh).cut.clone()
    }

    /// Keeps a connection for the next request.
    pub(crate) fn keep(self: &Arc<Self>, mut connection: Connection) {
        if !connection.wire.unread.is_empty() {
            // An answer to a question that nobody asked.
            return;
        }
        connection.reused = true;
        connection.wire.rest();
        let target = connection.target;
        let mut state = self.state();
        if connection.cut.token.is_cancelled() {
            return;
        }
        let Some(host) = state.hosts.get_mut(&target.ip()) else { return };
        let idle = host.idle.entry(target.port()).or_default();
        if idle.len() < self.limits.idle_per_target {
            idle.push(Idle { connection, since: Instant::now() });
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
                idle.retain(|entry| entry.since.elapsed() < limit && entry.connection.wire.is_quiet());
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
