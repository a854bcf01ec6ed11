//! `tcpip-forward`: the peer asks the sandbox to listen, and is given what connects.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use russh::server::Handle;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::carry::carry;
use crate::connection::Channels;

/// Ports below this are root's.
const UNPRIVILEGED: u16 = 1024;
/// After an error of accepting, which is mostly a lack of descriptors.
const PAUSE: Duration = Duration::from_millis(100);

/// Listens on the first of the addresses that can be had. The system's own choice of a port is never a privileged one.
pub(crate) fn listen(addresses: &[IpAddr], port: u16, uid: u32) -> io::Result<TcpListener> {
    if port != 0 && port < UNPRIVILEGED && uid != 0 {
        return Err(io::ErrorKind::PermissionDenied.into());
    }
    let mut failure = io::Error::from(io::ErrorKind::PermissionDenied);
    for address in addresses {
        match std::net::TcpListener::bind(SocketAddr::new(*address, port)) {
            Ok(listener) => {
                listener.set_nonblocking(true)?;
                return TcpListener::from_std(listener);
            }
            Err(error) => failure = error,
        }
    }
    Err(failure)
}

pub(crate) struct Listening {
    pub listener: TcpListener,
    /// As the peer wrote it, which is how it recognises the channels.
    pub host: String,
    pub port: u32,
    pub handle: Handle,
    pub channels: Channels,
    pub places: Arc<Semaphore>,
    pub tasks: TaskTracker,
    pub closing: CancellationToken,
}

impl Listening {
    pub(crate) async fn run(self) {
        loop {
            let accepted = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = self.closing.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => self.offer(stream, peer),
                Err(_) => tokio::time::sleep(PAUSE).await,
            }
        }
    }

    /// A connection for which there is no place is closed.
    fn offer(&self, stream: TcpStream, peer: SocketAddr) {
        let Ok(place) = Arc::clone(&self.places).try_acquire_owned() else { return };
        let (handle, channels) = (self.handle.clone(), self.channels.clone());
        let (host, port) = (self.host.clone(), self.port);
        self.tasks.spawn(async move {
            let _place = place;
            let origin = peer.ip().to_canonical().to_string();
            let opening = handle.channel_open_forwarded_tcpip(host, port, origin, u32::from(peer.port()));
            // The end of the connection ends this wait too.
            let Ok(channel) = opening.await else { return };
            let id = channel.id();
            let (_, writer) = channel.split();
            let (inbox, closing) = channels.opened(id);
            carry(stream, Arc::new(writer), inbox, closing).await;
            channels.remove(id);
        });
    }
}
