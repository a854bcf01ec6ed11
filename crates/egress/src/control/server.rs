//! HTTP/1.1 for the control API: bounded in connections, in the size of a request and in the time for it.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

use crate::diagnostics::tell;
use crate::settings::Level;

use super::answer::Answer;
use super::{Control, Request};

const LONGEST_BODY: usize = 1 << 20;
const TIME_FOR_A_BODY: Duration = Duration::from_secs(30);

/// For the head of a request; also how long an idle connection is kept, which is longer than the clients' pools keep it.
const TIME_FOR_A_HEAD: Duration = Duration::from_secs(75);

const LARGEST_HEAD: usize = 64 * 1024;

/// The sandbox may share the machine's loopback with us: it must not take the connections of those who control it.
const LOCAL_CONNECTIONS: usize = 64;
const OTHER_CONNECTIONS: usize = 64;

/// Accepts until it is dropped; the connections end with it.
pub async fn serve(listener: TcpListener, control: Arc<Control>) {
    let mut connections = JoinSet::new();
    let (local, other) =
        (Arc::new(Semaphore::new(LOCAL_CONNECTIONS)), Arc::new(Semaphore::new(OTHER_CONNECTIONS)));
    loop {
        while connections.try_join_next().is_some() {}
        let (stream, peer) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tell(Level::Warn, format_args!("cannot accept a connection to the control API: {error}"));
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let peer = peer.ip().to_canonical();
        let places = if peer.is_loopback() { &local } else { &other };
        // Nobody waits for a place: whoever is too many sees at once that the connection ends.
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let control = control.clone();
        connections.spawn(async move {
            connection(stream, peer, control).await;
            drop(place);
        });
    }
}

/// Answers on a connection that was accepted while nobody could answer. One that has ended meanwhile is left alone.
pub fn take_over(call: std::net::TcpStream, control: Arc<Control>) {
    if let (Ok(peer), Ok(stream)) = (call.peer_addr(), TcpStream::from_std(call)) {
        tokio::spawn(connection(stream, peer.ip().to_canonical(), control));
    }
}

async fn connection(stream: TcpStream, peer: IpAddr, control: Arc<Control>) {
    let answer = service_fn(move |request| {
        let control = control.clone();
        async move { Ok::<_, Infallible>(respond(request, peer, &control).await) }
    });
    let mut protocol = http1::Builder::new();
    protocol.timer(TokioTimer::new()).header_read_timeout(TIME_FOR_A_HEAD).max_buf_size(LARGEST_HEAD);
    if let Err(error) = protocol.serve_connection(TokioIo::new(stream), answer).await {
        tell(Level::Debug, format_args!("a connection to the control API ended: {error}"));
    }
}

async fn respond(request: http::Request<Incoming>, peer: IpAddr, control: &Control) -> Response<Full<Bytes>> {
    let (head, body) = request.into_parts();
    let whole = Limited::new(body, LONGEST_BODY).collect();
    let body = match tokio::time::timeout(TIME_FOR_A_BODY, whole).await {
        Ok(Ok(body)) => body.to_bytes().to_vec(),
        Ok(Err(error)) if error.is::<LengthLimitError>() => {
            return Answer::text(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 1 MiB").into();
        }
        Ok(Err(error)) => {
            return Answer::text(StatusCode::BAD_REQUEST, &format!("failed to read body: {error}")).into();
        }
        Err(_) => return Answer::text(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time").into(),
    };
    let path = head.uri.path().to_owned();
    let request = Request { method: head.method, path, headers: head.headers, body, peer };
    control.answer(&request).into()
}
