//! A front server around a forwarder, and backends that speak raw bytes.

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::response::{IntoResponse, Response};
use http::StatusCode;
use sandglass_proxy::{ForwardError, Forwarder, HeaderEdits, Limits, Pulse, requested_upgrade};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

pub(crate) fn quick_limits() -> Limits {
    Limits { response_head: Duration::from_secs(1), ..Limits::default() }
}

pub(crate) async fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Where nothing listens.
pub(crate) async fn nowhere() -> SocketAddr {
    listen().await.1
}

/// Everything that arrives is forwarded to `target`.
pub(crate) async fn front(forwarder: &Forwarder, target: SocketAddr) -> SocketAddr {
    watched(forwarder, target, None).await
}

/// The same, and somebody is told of what moves.
pub(crate) async fn watched(forwarder: &Forwarder, target: SocketAddr, pulse: Option<Pulse>) -> SocketAddr {
    let forwarder = forwarder.clone();
    serve(Router::new().fallback(move |request: Request| {
        let (forwarder, pulse) = (forwarder.clone(), pulse.clone());
        async move {
            match relay(&forwarder, target, pulse, request).await {
                Ok(response) => response,
                Err(error) => (status(&error), error.to_string()).into_response(),
            }
        }
    }))
    .await
}

fn status(error: &ForwardError) -> StatusCode {
    match error {
        ForwardError::Timeout => StatusCode::GATEWAY_TIMEOUT,
        ForwardError::Connect(_) => StatusCode::SERVICE_UNAVAILABLE,
        _ => StatusCode::BAD_GATEWAY,
    }
}

async fn relay(
    forwarder: &Forwarder,
    target: SocketAddr,
    pulse: Option<Pulse>,
    request: Request,
) -> Result<Response, ForwardError> {
    let edits = HeaderEdits::default();
    let response = if requested_upgrade(request.headers()).is_some() {
        forwarder.dial(target).await?.watched(pulse).upgrade(request, edits).await?
    } else {
        forwarder.connect(target).await?.watched(pulse).forward(request, edits).await?
    };
    Ok(response.map(Body::new))
}

pub(crate) async fn serve(app: Router) -> SocketAddr {
    let (listener, address) = listen().await;
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    address
}

/// A backend of raw bytes; the number counts the connections it got.
pub(crate) async fn backend<F, R>(talk: F) -> (SocketAddr, Arc<AtomicUsize>)
where
    F: Fn(TcpStream) -> R + Send + Sync + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let (listener, address) = listen().await;
    let connections = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&connections);
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            counter.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(talk(stream));
        }
    });
    (address, connections)
}

/// Answers the first request on each connection with these bytes, then closes.
pub(crate) async fn answering(answer: &'static [u8]) -> SocketAddr {
    let talk = move |mut stream: TcpStream| async move {
        read_head(&mut stream).await;
        stream.write_all(answer).await.unwrap();
    };
    backend(talk).await.0
}

/// The backend's view of a request: its head and, after an answer, all else that arrived within a moment.
pub(crate) async fn capturing() -> (SocketAddr, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel();
    let talk = move |mut stream: TcpStream| {
        let sender = sender.clone();
        async move {
            let mut seen = read_head(&mut stream).await;
            let mut rest = [0; 4096];
            while let Ok(Ok(n @ 1..)) =
                tokio::time::timeout(Duration::from_millis(500), stream.read(&mut rest)).await
            {
                seen.extend_from_slice(&rest[..n]);
            }
            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n").await;
            let _ = sender.send(String::from_utf8_lossy(&seen).into_owned());
        }
    };
    (backend(talk).await.0, receiver)
}

/// Reads up to and including the empty line, and whatever came with it.
pub(crate) async fn read_head(stream: &mut TcpStream) -> Vec<u8> {
    let mut head = Vec::new();
    while !head.windows(4).any(|w| w == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await.unwrap_or(0) == 0 {
            break;
        }
    }
    head
}

/// Sends bytes and reads until the other side closes; the flag says whether it closed cleanly.
pub(crate) async fn talk(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    stream.write_all(request).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    String::from_utf8_lossy(&answer).into_owned()
}

pub(crate) async fn get(address: SocketAddr, path: &str) -> String {
    talk(address, format!("GET {path} HTTP/1.1\r\nhost: front\r\nconnection: close\r\n\r\n").as_bytes()).await
}

/// Against hanging; nothing is measured by it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until the condition holds.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..PATIENCE.as_millis() / 10 {
        if holds() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("still not so: {what}");
}
