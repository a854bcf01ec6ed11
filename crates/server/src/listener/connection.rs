//! One connection, from the TLS handshake to its end.

use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};

use axum::{body::Body, extract::ConnectInfo, response::Response};
use bytes::BytesMut;
use http::{HeaderValue, Request, StatusCode, Version, header};
use hyper::{
    body::{Body as _, Incoming},
    server::conn::{http1, http2},
    service::service_fn,
    upgrade::Upgraded,
};
use hyper_util::rt::{TokioIo, TokioTimer};
use rustix::net::sockopt;
use sandglass_proxy::{Reclaim, Reclaimed};
use tokio::{
    io::AsyncReadExt,
    net::TcpStream,
    time::{timeout, timeout_at},
};
use tokio_util::sync::CancellationToken;

use super::{
    accept::Tasks,
    gate::Gate,
    inspector::Inspector,
    keep_alive::KeptTimer,
    malformed::Malformed,
    multiplexed::{Activity, Exchange},
    settings::{Scheme, Serving, Transport},
    stream::Stream,
    upload::{Progress, Upload},
    wire::{Open, Wire},
};

/// What an HTTP/2 connection starts with.
/// What may wait for a slow reader, beside one piece of the body.
const ANSWER_AHEAD: usize = 128 << 10;
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Clients keep idle connections for about as long as the configured time; closing a little later lets them close first.
const KEEP_ALIVE_MARGIN: Duration = Duration::from_secs(5);
/// A silent peer is asked whether it is still there, and given up when it does not say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG_WITHIN: Duration = Duration::from_secs(20);
/// A client that the network has lost is asked after this silence, and given up after as much again.
const GONE_AFTER: Duration = Duration::from_secs(60);
const PROBES: u32 = 4;
/// How long a connection may be open before its first request begins. Browsers open some that they do not need, for less than that.
const UNUSED: Duration = Duration::from_secs(60);

/// A connection that was accepted.
pub(super) struct Accepted {
    pub(super) stream: TcpStream,
    pub(super) peer: SocketAddr,
    pub(super) open: Open,
}

/// What all connections of a listener share.
pub(super) struct Shared {
    pub(super) serving: Serving,
    pub(super) tasks: Tasks,
    pub(super) stop: CancellationToken,
}

/// Why a connection ended before its time. Clients come and go as they like: for the log only.
pub(super) type Ended = Box<dyn std::error::Error + Send + Sync>;

/// Serves it to its end, or until it is an upgraded one.
pub(super) async fn serve(shared: Arc<Shared>, accepted: Accepted) -> Result<(), Ended> {
    let Accepted { stream, peer, open } = accepted;
    settle(&stream);
    let Some((stream, begun)) = first_bytes(&shared, stream).await? else { return Ok(()) };
    let scheme = if matches!(stream, Stream::Tls(_)) { Scheme::Https } else { Scheme::Http };
    let limits = &shared.serving.limits;
    let gate = Arc::<Gate>::default();
    let connection = Arc::new(Connection { shared: shared.clone(), peer, scheme, gate: gate.clone() });
    if begun.starts_with(PREFACE) {
        let wire = Wire::new((stream, begun), Inspector::blind(limits), gate, limits, open);
        return connection.serve_2(TokioIo::new(wire)).await;
    }
    let wire = Wire::new((stream, begun), Inspector::new(limits), gate, limits, open);
    connection.serve_1(TokioIo::new(wire)).await
}

/// What every connection needs of its socket. One that refuses is served without.
fn settle(stream: &TcpStream) {
    // Small frames (events, keystrokes) must not wait for an acknowledgement.
    let _ = stream.set_nodelay(true);
    // A client whose machine is gone says nothing, as one does that waits for the next event for days.
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, GONE_AFTER);
    let _ = sockopt::set_tcp_keepintvl(stream, GONE_AFTER / PROBES);
    let _ = sockopt::set_tcp_keepcnt(stream, PROBES);
}

/// Whatever lies on top of TCP, and enough bytes to tell the version by. `None` when nothing comes.
async fn first_bytes(shared: &Shared, stream: TcpStream) -> Result<Option<(Stream, BytesMut)>, Ended> {
    let limits = &shared.serving.limits;
    let mut stream = match &shared.serving.transport {
        Transport::Plain => Stream::Plain(stream),
        Transport::Tls(certificates) => {
            Stream::Tls(Box::new(timeout(limits.head, certificates.acceptor().accept(stream)).await??))
        }
    };
    let mut begun = BytesMut::with_capacity(512);
    let first = tokio::select! {
        read = timeout(UNUSED.min(limits.keep_alive), stream.read_buf(&mut begun)) => read??,
        () = shared.stop.cancelled() => 0,
    };
    if first == 0 {
        return Ok(None);
    }
    let deadline = tokio::time::Instant::now() + limits.head;
    while begun.len() < PREFACE.len() && PREFACE.starts_with(&begun) {
        if timeout_at(deadline, stream.read_buf(&mut begun)).await?? == 0 {
            return Ok(None);
        }
    }
    Ok(Some((stream, begun)))
}

/// For tunnels, which read and write the connection itself.
fn reclaim(upgraded: Upgraded) -> Result<Reclaimed, Upgraded> {
    upgraded.downcast::<TokioIo<Wire>>().map(|parts| parts.io.into_inner().reclaim(parts.read_buf))
}

/// Shared by the requests of one connection, so that none of them touches what all connections share.
struct Connection {
    shared: Arc<Shared>,
    peer: SocketAddr,
    scheme: Scheme,
    gate: Arc<Gate>,
}

impl Connection {
    async fn serve_1(self: Arc<Self>, wire: TokioIo<Wire>) -> Result<(), Ended> {
        let limits = self.shared.serving.limits;
        let mut http = http1::Builder::new();
        http.timer(KeptTimer::default())
            .max_headers(limits.head_fields)
            .max_header_size(limits.head_bytes + 64)
            .max_buf_size((2 * limits.head_bytes).max(ANSWER_AHEAD))
            // Partial heads do not get this far, so this is the time without a request.
            .header_read_timeout(limits.keep_alive + KEEP_ALIVE_MARGIN);
        // Of this connection alone: it is asked whenever something moves.
        let stop = self.shared.stop.child_token();
        let service = service_fn(move |request| {
            let connection = self.clone();
            async move { Ok::<_, Infallible>(connection.answer_1(request).await) }
        });
        let mut serving = std::pin::pin!(http.serve_connection(wire, service).with_upgrades());
        tokio::select! {
            ended = &mut serving => return Ok(ended?),
            () = stop.cancelled() => serving.as_mut().graceful_shutdown(),
        }
        Ok(serving.await?)
    }

    async fn answer_1(&self, request: Request<Incoming>) -> Response {
        let gate = &*self.gate;
        if let Some(malformed) = gate.refusal(request.method()) {
            return self.refuse(malformed);
        }
        let asks_for_upgrade =
            request.version() == Version::HTTP_11 && request.headers().contains_key(header::UPGRADE);
        let (mut request, progress) = self.with_upload(request);
        if asks_for_upgrade {
            request.extensions_mut().insert(Reclaim(reclaim));
        }
        let mut response = self.answer(request).await;
        let silent = progress.is_some_and(|progress| progress.answered());
        let upgraded = response.status() == StatusCode::SWITCHING_PROTOCOLS;
        let broken = gate.broken().or(silent.then_some(Malformed::TooSlow));
        if let Some(malformed) = broken.filter(|_| !upgraded) {
            response = self.refuse(malformed);
        }
        if asks_for_upgrade {
            gate.decide(upgraded);
        }
        response
    }

    /// The answer to what is malformed; nothing else is read from an HTTP/1 connection after it.
    fn refuse(&self, malformed: Malformed) -> Response {
        tracing::debug!(peer = %self.peer, %malformed, "a request was refused for its form");
        let mut response = (self.shared.serving.refuse)(malformed);
        response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        response
    }

    async fn serve_2(self: Arc<Self>, wire: TokioIo<Wire>) -> Result<(), Ended> {
        let limits = self.shared.serving.limits;
        let mut http = http2::Builder::new(self.shared.tasks.clone());
        http.timer(TokioTimer::new())
            .enable_connect_protocol()
            .max_concurrent_streams(limits.streams)
            .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
            .keep_alive_interval(PING_EVERY)
            .keep_alive_timeout(PONG_WITHIN);
        let stop = self.shared.stop.child_token();
        let activity = Activity::default();
        let idle = activity.idle(limits.keep_alive + KEEP_ALIVE_MARGIN);
        let service = service_fn(move |request| {
            let (connection, busy) = (self.clone(), activity.begin());
            async move {
                let response = connection.answer_2(request).await;
                Ok::<_, Infallible>(response.map(|body| busy.until_end_of(body)))
            }
        });
        let mut serving = std::pin::pin!(http.serve_connection(wire, service));
        // Told to go away, a client opens another connection; what it has open here goes on.
        tokio::select! {
            ended = &mut serving => return Ok(ended?),
            () = stop.cancelled() => {}
            () = idle => {}
        }
        serving.as_mut().graceful_shutdown();
        Ok(serving.await?)
    }

    async fn answer_2(&self, mut request: Request<Incoming>) -> Response {
        let exchange = match Exchange::admit(&mut request, &self.shared.serving.limits) {
            Ok(exchange) => exchange,
            Err(malformed) => return self.refuse(malformed),
        };
        let (request, progress) = self.with_upload(request);
        let response = self.answer(request).await;
        if progress.is_some_and(|progress| progress.answered()) {
            return self.refuse(Malformed::TooSlow);
        }
        exchange.answer(response)
    }

    /// What there is to know of a body, if there is one.
    fn with_upload(&self, request: Request<Incoming>) -> (Request<Body>, Option<Arc<Progress>>) {
        if request.body().is_end_stream() {
            return (request.map(|_| Body::empty()), None);
        }
        let (request, progress) = Upload::of(request, self.shared.serving.limits.body_silence);
        (request.map(Body::new), Some(progress))
    }

    async fn answer(&self, mut request: Request<Body>) -> Response {
        request.extensions_mut().insert(ConnectInfo(self.peer));
        request.extensions_mut().insert(self.scheme);
        self.shared.serving.answers.answer(request).await
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, extract::Request as Asked, response::IntoResponse};
    use sandglass_proxy::Socket;
    use tokio::{io::AsyncWriteExt, net::TcpListener, sync::mpsc};

    use super::*;
    use crate::listener::{Limits, accept};

    #[tokio::test]
    async fn clients_that_are_gone_are_found_out() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (client, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
        let (stream, _) = accepted.unwrap();
        settle(&stream);
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        assert_eq!(sockopt::tcp_keepidle(&stream).unwrap(), Duration::from_secs(60));
        assert_eq!(sockopt::tcp_keepintvl(&stream).unwrap(), Duration::from_secs(15));
        assert_eq!(sockopt::tcp_keepcnt(&stream).unwrap(), 4);
        drop(client);
    }

    #[tokio::test]
    async fn an_upgraded_connection_is_given_back_with_all_that_was_read() {
        let (given, mut reclaimed) = mpsc::unbounded_channel();
        let upgrade = move |mut request: Asked| {
            let reclaim = *request.extensions().get::<Reclaim>().unwrap();
            let (upgraded, given) = (hyper::upgrade::on(&mut request), given.clone());
            tokio::spawn(async move { given.send(reclaim.0(upgraded.await.unwrap())).ok() });
            let agreed = [(header::CONNECTION, "upgrade"), (header::UPGRADE, "x")];
            std::future::ready((StatusCode::SWITCHING_PROTOCOLS, agreed))
        };
        let socket = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = socket.local_addr().unwrap();
        let serving = Serving {
            answers: Arc::new(Router::new().fallback(upgrade)),
            refuse: |_| StatusCode::BAD_REQUEST.into_response(),
            transport: Transport::Plain,
            limits: Limits { drain: Duration::from_millis(50), ..Limits::default() },
        };
        let stop = CancellationToken::new();
        let serving = accept::spawn(socket, serving, stop.clone()).unwrap();
        let mut client = TcpStream::connect(address).await.unwrap();
        let asks = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\nearly";
        client.write_all(asks).await.unwrap();
        let reclaimed = reclaimed.recv().await.unwrap().expect("it is of our own kind");
        assert!(matches!(reclaimed.socket, Socket::Tcp(_)), "the socket itself");
        assert_eq!(&*reclaimed.read, b"early");
        // It counts as open until it is dropped.
        stop.cancel();
        reclaimed.cut.cancelled().await;
        assert!(!serving.is_finished());
        drop(reclaimed);
        serving.await.unwrap();
    }
}
