//! Where agents come in: one Unix socket a sandbox, and, where configured, one TCP listener for those that cannot use theirs.
//!
//! What connects is a box, and a box may be hostile: connections of one sandbox are bounded in number, whatever they come over, and heads and
//! bodies in size and time. Over TCP those that have not shown yet whose they are give way to newer ones.

use std::{
    convert::Infallible,
    future::{pending, poll_fn},
    io,
    net::SocketAddr,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
    time::Duration,
};

use hyper::{server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream, UnixStream},
    sync::Semaphore,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{
    Workspaces,
    calls::{self, Way},
    desk::Desk,
    room::{Bounds, Place, Room},
};

/// An agent has a stream, heartbeats, events and logs under way at a time; git asks for credentials beside them.
const CONNECTIONS: usize = 32;
/// Over TCP; a sandbox has as many as over its socket.
const BOUNDS: Bounds = Bounds { strangers: 1024, of_one: CONNECTIONS };
const HEAD_PATIENCE: Duration = Duration::from_secs(10);
/// How long a connection over TCP may take to show whose it is.
const STRANGER_PATIENCE: Duration = Duration::from_secs(20);
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
    let poll = move |cx: &mut Context<'_>| listener.poll_accept(cx).map_ok(|(stream, _)| stream);
    let room = Arc::new(Semaphore::new(CONNECTIONS));
    let serve = move |workspaces, stream: UnixStream| {
        // One too many is closed at once.
        let place = room.clone().try_acquire_owned().ok()?;
        Some(async move {
            serve(workspaces, stream, Way::Socket(of)).await;
            drop(place);
        })
    };
    workspaces.tasks.spawn(accept(workspaces.clone(), poll, serve, closing));
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
    let poll = move |cx: &mut Context<'_>| listener.poll_accept(cx);
    let room = Room::new(BOUNDS);
    let serve = move |workspaces, (stream, from): (TcpStream, SocketAddr)| {
        let place = Arc::new(room.enter(from.ip()));
        Some(async move {
            tokio::select! {
                () = serve(workspaces, stream, Way::Network(place.clone())) => {}
                () = place.put_out() => {}
                () = strange_for_long(&place) => {}
            }
        })
    };
    workspaces.tasks.spawn(accept(workspaces.clone(), poll, serve, CancellationToken::new()));
    Ok(address)
}

/// Ends when a connection should have shown whose it is and has not.
async fn strange_for_long(place: &Place) {
    tokio::time::sleep(STRANGER_PATIENCE).await;
    if place.is_recognised() {
        pending().await
    }
}

/// Serves what `poll` accepts, as far as there is room for it, until that is over.
async fn accept<S, F: Future<Output = ()> + Send + 'static>(
    workspaces: Arc<Workspaces>,
    poll: impl Fn(&mut Context<'_>) -> Poll<io::Result<S>>,
    serve: impl Fn(Arc<Workspaces>, S) -> Option<F>,
    closing: CancellationToken,
) {
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            accepted = poll_fn(&poll) => accepted,
            Some(_) = connections.join_next(), if !connections.is_empty() => continue,
            () = closing.cancelled() => return,
            () = workspaces.stopping.cancelled() => return,
        };
        match accepted {
            Ok(stream) => {
                if let Some(served) = serve(workspaces.clone(), stream) {
                    connections.spawn(served);
                }
            }
            Err(error) => {
                warn!(%error, "an agent could not be let in");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

async fn serve(workspaces: Arc<Workspaces>, stream: impl AsyncRead + AsyncWrite + Unpin, way: Way) {
    let service = service_fn(move |request| {
        let (workspaces, way) = (workspaces.clone(), way.clone());
        async move { Ok::<_, Infallible>(calls::answer(workspaces, &way, request).await) }
    });
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(HEAD_PATIENCE);
    // An agent that breaks off is heard again.
    let _ = builder.serve_connection(TokioIo::new(stream), service).await;
}
