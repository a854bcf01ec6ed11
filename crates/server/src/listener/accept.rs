//! Accepting connections: bounded in number and in idleness, drained at the end.
//!
//! Invariant: no client can hold a connection for longer than the keep-alive time without sending a whole request head, and no number of
//! clients can use up the descriptors that the engine and its shims need.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use axum::{Router, body::Body, extract::ConnectInfo};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use tokio::{net::TcpListener, sync::Semaphore, task::JoinHandle};
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;
use tracing::{debug, info, warn};

use crate::linger::Lingering;

/// Clients keep idle connections for about as long as the configured time; closing a little later lets them close first.
const KEEP_ALIVE_MARGIN: Duration = Duration::from_secs(5);
/// Pause after an error of `accept`, such as a full descriptor table.
const ACCEPT_RETRY: Duration = Duration::from_millis(50);

/// What connections may take.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// How long a connection may be without a whole request head.
    pub keep_alive: Duration,
    /// How long requests in work may take once the server is told to stop.
    pub drain: Duration,
    /// Open connections; the kernel queues what is beyond.
    pub connections: usize,
}

/// Half of the descriptors: each proxied request needs a second one, and every sandbox a subscription.
pub fn connection_limit() -> usize {
    let files = rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(65_536);
    usize::try_from(files / 2).unwrap_or(16_384).clamp(16, 16_384)
}

/// Serves until `stop`, then drains.
///
/// # Errors
/// When the listener cannot be used.
pub fn spawn(
    listener: std::net::TcpListener,
    router: Router,
    stop: CancellationToken,
    limits: Limits,
) -> std::io::Result<JoinHandle<()>> {
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    Ok(tokio::spawn(async move {
        let open = GracefulShutdown::new();
        tokio::select! {
            () = accept(&listener, &router, &open, limits) => {}
            () = stop.cancelled() => {}
        }
        drop(listener);
        tokio::select! {
            () = open.shutdown() => {}
            () = tokio::time::sleep(limits.drain) => info!("connections that are still open are cut"),
        }
    }))
}

async fn accept(listener: &TcpListener, router: &Router, open: &GracefulShutdown, limits: Limits) {
    let slots = Arc::new(Semaphore::new(limits.connections));
    let mut http = auto::Builder::new(TokioExecutor::new()).http1_only();
    http.http1().timer(TokioTimer::new()).header_read_timeout(limits.keep_alive + KEEP_ALIVE_MARGIN);
    loop {
        let Ok(slot) = slots.clone().acquire_owned().await else { return };
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                warn!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_RETRY).await;
                continue;
            }
        };
        // Small frames (events, keystrokes) must not wait for an acknowledgement.
        let _ = stream.set_nodelay(true);
        let router = router.clone();
        let service =
            service_fn(move |request: hyper::Request<Incoming>| answer(router.clone(), peer, request));
        let connection = http.serve_connection_with_upgrades(TokioIo::new(stream), service).into_owned();
        let watched = open.watch(connection);
        tokio::spawn(async move {
            let _slot = slot;
            if let Err(error) = watched.await {
                // A client that went away or never finished its request is its own business.
                debug!(%peer, %error, "a connection ended early");
            }
        });
    }
}

async fn answer(
    router: Router,
    peer: SocketAddr,
    request: hyper::Request<Incoming>,
) -> Result<axum::response::Response, Infallible> {
    let mut request = Lingering::of(request).map(Body::new);
    request.extensions_mut().insert(ConnectInfo(peer));
    router.oneshot(request).await
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    use super::*;

    #[tokio::test]
    async fn half_a_request_is_cut_off_and_whole_ones_are_answered() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let limits = Limits { keep_alive: Duration::ZERO, drain: Duration::from_secs(1), connections: 1 };
        let router = Router::new().route("/", get(|| async { "here" }));
        let serving = spawn(listener, router, stop.clone(), limits).unwrap();

        let mut slow = TcpStream::connect(address).await.unwrap();
        slow.write_all(b"GET / HTTP/1.1\r\nHost:").await.unwrap();
        // The only slot is taken, so this one waits in the kernel until the slow one was cut off.
        let mut whole = TcpStream::connect(address).await.unwrap();
        whole.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
        let mut answer = String::new();
        tokio::time::timeout(KEEP_ALIVE_MARGIN * 3, whole.read_to_string(&mut answer))
            .await
            .unwrap()
            .unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("here"), "{answer}");
        let mut rest = Vec::new();
        slow.read_to_end(&mut rest).await.unwrap();

        stop.cancel();
        serving.await.unwrap();
    }

    #[tokio::test]
    async fn an_answer_that_comes_before_the_end_of_an_upload_arrives() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let limits =
            Limits { keep_alive: Duration::from_secs(5), drain: Duration::from_secs(1), connections: 4 };
        let refuse = || async { (http::StatusCode::INSUFFICIENT_STORAGE, "full") };
        let router = Router::new().route("/", axum::routing::post(refuse));
        let serving = spawn(listener, router, stop.clone(), limits).unwrap();

        // More than the sockets' buffers hold, so that an unread rest would reset the connection.
        const BODY: usize = 64 << 20;
        let mut client = TcpStream::connect(address).await.unwrap();
        let head =
            format!("POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {BODY}\r\n\r\n");
        client.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..BODY >> 16 {
            client.write_all(&[0; 1 << 16]).await.unwrap();
        }
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 507") && answer.ends_with("full"), "{answer}");
        stop.cancel();
        serving.await.unwrap();
    }
}
