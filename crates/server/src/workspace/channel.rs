//! Where agents come in: one Unix socket a sandbox, and, where configured, one TCP listener for those that cannot use theirs.
//!
//! What connects is a box, and a box may be hostile: connections of one sandbox are bounded in number, and heads and bodies in size
//! and time.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use sandglass_sandbox::SandboxId;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Workspaces, calls, desk::Desk};

/// An agent has a stream, heartbeats, events and logs under way at a time; git asks for credentials beside them.
const CONNECTIONS: usize = 32;
/// Of all agents over TCP together.
const TCP_CONNECTIONS: usize = 4096;
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// After an error of `accept`, which mostly says that there are no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Opens the socket of a sandbox, unless it is open.
///
/// # Errors
/// When it cannot be made.
pub(super) fn open(workspaces: &Arc<Workspaces>, desk: &Arc<Desk>) -> io::Result<()> {
    if desk.open.swap(true, Ordering::SeqCst) {
        return Ok(());
    }
    let listener =
        workspaces.folders.listen(desk.id).inspect_err(|_| desk.open.store(false, Ordering::SeqCst))?;
    let (of, closing) = (desk.id, desk.closing.clone());
    let accepting = accept_unix(workspaces.clone(), listener, of, closing);
    workspaces.tasks.spawn(accepting);
    Ok(())
}

/// Listens on TCP for the agents of every sandbox.
///
/// # Errors
/// When the listener cannot be used.
pub(super) fn listen(
    workspaces: &Arc<Workspaces>,
    listener: std::net::TcpListener,
) -> io::Result<SocketAddr> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let address = listener.local_addr()?;
    info!(%address, "listening for agents");
    workspaces.tasks.spawn(accept_tcp(workspaces.clone(), listener));
    Ok(address)
}

async fn accept_unix(
    workspaces: Arc<Workspaces>,
    listener: UnixListener,
    of: SandboxId,
    closing: CancellationToken,
) {
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = closing.cancelled() => return,
            () = workspaces.stopping.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                // One too many is closed at once.
                if let Ok(place) = room.clone().try_acquire_owned() {
                    let workspaces = workspaces.clone();
                    connections.spawn(async move {
                        serve(workspaces, stream, Some(of)).await;
                        drop(place);
                    });
                }
            }
            Err(error) => {
                warn!(sandbox = %of, %error, "an agent could not be let in");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn accept_tcp(workspaces: Arc<Workspaces>, listener: TcpListener) {
    let room = Arc::new(Semaphore::new(TCP_CONNECTIONS));
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = workspaces.stopping.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                if let Ok(place) = room.clone().try_acquire_owned() {
                    let workspaces = workspaces.clone();
                    connections.spawn(async move {
                        serve(workspaces, stream, None).await;
                        drop(place);
                    });
                }
            }
            Err(error) => {
                warn!(%error, "an agent could not be let in");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(
    workspaces: Arc<Workspaces>,
    stream: impl AsyncRead + AsyncWrite + Unpin,
    of: Option<SandboxId>,
) {
    let service = service_fn(move |request| {
        let workspaces = workspaces.clone();
        async move { Ok::<_, Infallible>(calls::answer(workspaces, of, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_PATIENCE);
    // An agent that breaks off is heard again.
    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
}
