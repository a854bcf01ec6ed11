//! Accepting connections. Bounded, and no error of one connection or of `accept` ends the loop.
//!
//! Invariant: processes of the box, however many connections they open, take none of the slots that are kept
//! for whoever calls from outside.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinHandle;

use super::router::{Agent, route};

/// Each connection costs a descriptor and some buffers; beyond this many the kernel queues those from outside.
/// A thousand commands at once, and whoever else calls, must fit in.
const MAX_OUTSIDE: usize = 1536;
/// Those from the box itself are closed at once beyond this many: queued, they would be in the way of the others.
const MAX_LOCAL: usize = 128;
/// A client connects because it has something to ask; one that does not is only taking up a slot.
const FIRST_HEAD_TIMEOUT: Duration = Duration::from_secs(10);
/// Between requests a client may keep its connection for longer than clients usually do.
const HEADER_TIMEOUT: Duration = Duration::from_secs(300);

/// Binds as the reference does: IPv4 only, on every address of the box.
pub fn bind(port: u16) -> io::Result<TcpListener> {
    let socket = TcpSocket::new_v4()?;
    socket.set_reuseaddr(true)?;
    socket.bind(([0, 0, 0, 0], port).into())?;
    socket.listen(1024)
}

/// Accepts connections until it is stopped.
pub struct Serving {
    accepting: JoinHandle<()>,
    closing: watch::Sender<bool>,
}

impl Serving {
    pub fn start(listener: TcpListener, agent: Arc<Agent>) -> Self {
        let (closing, closed) = watch::channel(false);
        Serving { accepting: tokio::spawn(serve(listener, agent, closed)), closing }
    }

    /// Takes nothing new, and lets what is being answered come to its end within `grace`.
    pub async fn stop(self, grace: Duration) {
        self.accepting.abort();
        self.closing.send_replace(true);
        // Every connection has a receiver.
        let _ = tokio::time::timeout(grace, self.closing.closed()).await;
    }
}

async fn serve(listener: TcpListener, agent: Arc<Agent>, closing: watch::Receiver<bool>) {
    let slots = Slots::new(descriptors());
    loop {
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                // Out of descriptors or memory: wait for some to come back instead of spinning.
                let exhausted = matches!(
                    error.raw_os_error(),
                    Some(libc::EMFILE | libc::ENFILE | libc::ENOBUFS | libc::ENOMEM)
                );
                tokio::time::sleep(Duration::from_millis(if exhausted { 50 } else { 1 })).await;
                continue;
            }
        };
        let local = stream.local_addr().is_ok_and(|own| from_the_box(peer.ip(), own.ip()));
        if let Some(slot) = slots.take(local).await {
            tokio::spawn(talk(stream, peer, Arc::clone(&agent), (slot, closing.clone())));
        }
    }
}

/// Serves one connection until it ends, or until the agent does and its last answer is out.
async fn talk(
    stream: TcpStream,
    peer: SocketAddr,
    agent: Arc<Agent>,
    (_slot, mut closing): (OwnedSemaphorePermit, watch::Receiver<bool>),
) {
    let _ = stream.set_nodelay(true);
    let asked = AtomicBool::new(false);
    let service = service_fn(|request| {
        asked.store(true, Ordering::Relaxed);
        let agent = Arc::clone(&agent);
        async move { Ok::<_, Infallible>(route(&agent, request, peer).await) }
    });
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEADER_TIMEOUT).title_case_headers(true);
    let mut connection = std::pin::pin!(http.serve_connection(TokioIo::new(stream), service).with_upgrades());
    let mut patience = std::pin::pin!(tokio::time::sleep(FIRST_HEAD_TIMEOUT));
    let (mut patient, mut closed) = (true, false);
    loop {
        tokio::select! {
            // A broken connection is the client's business; there is nobody to tell.
            _ = &mut connection => return,
            () = &mut patience, if patient => {
                if !asked.load(Ordering::Relaxed) {
                    return;
                }
                patient = false;
            }
            _ = closing.changed(), if !closed => {
                closed = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

/// A process of the box can only call from an address of the box. One that is not loopback is the one it calls,
/// unless it goes through loopback to a socket bound to the other.
fn from_the_box(peer: IpAddr, own: IpAddr) -> bool {
    peer.is_loopback() || own.is_loopback() || peer == own
}

fn descriptors() -> usize {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    limit.and_then(|limit| usize::try_from(limit).ok()).unwrap_or(usize::MAX)
}

struct Slots {
    outside: Arc<Semaphore>,
    local: Arc<Semaphore>,
}

impl Slots {
    /// Where descriptors are few, connections must leave some for commands and files: local ones (two each, when
    /// proxied) most of them, all together half.
    fn new(descriptors: usize) -> Self {
        let local = MAX_LOCAL.min(descriptors / 8);
        let outside = MAX_OUTSIDE.min(descriptors / 2).max(1);
        Slots { outside: Arc::new(Semaphore::new(outside)), local: Arc::new(Semaphore::new(local)) }
    }

    /// A local connection gets a slot now or never; one from outside waits for it.
    async fn take(&self, local: bool) -> Option<OwnedSemaphorePermit> {
        if local {
            Arc::clone(&self.local).try_acquire_owned().ok()
        } else {
            Arc::clone(&self.outside).acquire_owned().await.ok()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_of_the_box_is_told_from_others() {
        let from = |peer: &str, own: &str| from_the_box(peer.parse().unwrap(), own.parse().unwrap());
        assert!(from("127.0.0.1", "127.0.0.1") && from("127.9.9.9", "10.1.0.2"));
        assert!(from("10.1.0.2", "10.1.0.2") && from("10.1.0.2", "127.0.0.1"));
        assert!(!from("10.1.0.1", "10.1.0.2") && !from("169.254.1.1", "10.1.0.2"));
    }

    #[tokio::test]
    async fn local_connections_leave_the_slots_for_others() {
        let slots = Slots::new(65_536);
        let mut held = Vec::new();
        while let Some(slot) = slots.take(true).await {
            held.push(slot);
        }
        assert_eq!(held.len(), MAX_LOCAL);
        for _ in 0..MAX_OUTSIDE {
            held.push(slots.take(false).await.unwrap());
        }
        drop(held.swap_remove(0));
        assert!(slots.take(true).await.is_some());
        assert_eq!(Slots::new(40).local.available_permits(), 5);
    }
}
