//! `direct-tcpip`: the peer asks the sandbox to connect somewhere.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use russh::ChannelOpenFailure;
use russh::server::ChannelOpenHandle;
use tokio::net::TcpStream;
use tokio_util::sync::CancellationToken;

use super::carry::carry;
use super::{Forwarding, Resolve};
use crate::flow::Inbox;
use crate::session::Writer;

/// For all addresses of a name together.
const CONNECT: Duration = Duration::from_secs(15);

pub(crate) struct Target {
    pub host: String,
    pub port: u16,
}

pub(crate) struct Direct {
    pub target: Target,
    pub policy: Forwarding,
    pub resolve: Arc<dyn Resolve>,
    pub reply: ChannelOpenHandle,
    pub writer: Writer,
    pub inbox: Inbox,
    pub closing: CancellationToken,
}

impl Direct {
    pub(crate) async fn run(self) {
        let Direct { target, policy, resolve, reply, writer, inbox, closing } = self;
        let connecting = connect(&target, policy, &*resolve);
        let connected = tokio::select! {
            connected = tokio::time::timeout(CONNECT, connecting) => connected,
            () = closing.cancelled() => return,
        };
        match connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())) {
            Ok(stream) => {
                reply.accept().await;
                carry(stream, writer, inbox, closing).await;
            }
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                reply.reject(ChannelOpenFailure::AdministrativelyProhibited).await;
            }
            Err(_) => reply.reject(ChannelOpenFailure::ConnectFailed).await,
        }
    }
}

/// The first address that answers. What the policy forbids is left out, and an error of its own when nothing is left.
async fn connect(target: &Target, policy: Forwarding, resolve: &dyn Resolve) -> io::Result<TcpStream> {
    let found = resolve.resolve(&target.host, target.port).await?;
    let permitted: Vec<SocketAddr> = found.into_iter().filter(|address| policy.permits(address)).collect();
    let mut failure = io::Error::from(io::ErrorKind::PermissionDenied);
    for address in permitted {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok(stream),
            // A refusal by the kernel is no refusal by the policy.
            Err(error) => failure = io::Error::other(error),
        }
    }
    Err(failure)
}
