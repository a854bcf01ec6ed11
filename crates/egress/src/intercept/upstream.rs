//! The connection to the server behind one intercepted connection: made again when it is gone, never to anywhere else.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http::{Request, Response};
use http_body::Body as _;
use http_body_util::{BodyExt, Empty};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::pki_types::ServerName;
use tokio::sync::Mutex;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;

use super::message::Body;
use super::proxy;
use super::service::Shared;
use super::tunnel::Stream;
use super::{CONNECTION_WINDOW, MAX_HEAD, MAX_HEADERS, SEND_BUFFER, STREAM_WINDOW};

const HANDSHAKE: Duration = Duration::from_secs(10);
const PING: Duration = Duration::from_secs(60);

/// What both sides of an intercepted connection speak.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Protocol {
    Http1,
    Http2,
}

/// Why there is no answer from the server.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("credential proxy unavailable")]
    Vault,
    #[error("cannot connect: {0}")]
    Connect(#[source] io::Error),
    #[error("the server's certificate or handshake was not accepted: {0}")]
    Handshake(#[source] io::Error),
    #[error("the server changed its protocol")]
    Changed,
    #[error("the server did not answer: {0}")]
    Answer(#[source] hyper::Error),
}

/// Ends the task that drives a connection together with what it is for.
struct Driver(JoinHandle<()>);

impl Drop for Driver {
    fn drop(&mut self) {
        self.0.abort();
    }
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

struct Open {
    sender: Sender,
    _driver: Driver,
    /// The name that the proxy was asked for, if there is one.
    name: Option<String>,
}

pub(super) struct Upstream {
    shared: Arc<Shared>,
    destination: SocketAddr,
    /// The name that the server has to prove; none without TLS.
    proven: Option<String>,
    protocol: Protocol,
    open: Mutex<Option<Open>>,
}

impl Upstream {
    /// Without TLS; connects with the first request.
    pub(super) fn plain(shared: Arc<Shared>, destination: SocketAddr) -> Self {
        Self { shared, destination, proven: None, protocol: Protocol::Http1, open: Mutex::new(None) }
    }

    /// Connects, verifies the server's name and offers it the client's protocols. Also says what it chose, if anything.
    pub(super) async fn verified(
        shared: Arc<Shared>,
        destination: SocketAddr,
        name: &str,
        offers: Vec<Vec<u8>>,
    ) -> Result<(Self, Option<Vec<u8>>), Failure> {
        let (stream, chosen) = secure(&shared, destination, name, offers).await?;
        let protocol = if chosen.as_deref() == Some(b"h2") { Protocol::Http2 } else { Protocol::Http1 };
        let open = handshake(stream, protocol, None).await?;
        let upstream = Self {
            shared,
            destination,
            proven: Some(name.to_owned()),
            protocol,
            open: Mutex::new(Some(open)),
        };
        Ok((upstream, chosen))
    }

    pub(super) const fn protocol(&self) -> Protocol {
        self.protocol
    }

    /// Sends a request that was judged to be for `name`. One that a kept connection has not taken is sent once more on a new one.
    pub(super) async fn send(
        &self,
        name: Option<&str>,
        request: Request<Body>,
    ) -> Result<Response<Incoming>, Failure> {
        let copy = replayable(&request).then(|| without_body(&request));
        let (kept, attempt) = self.attempt(name, request).await?;
        let (error, unsent) = match attempt {
            Ok(response) => return Ok(response),
            Err(failed) => failed,
        };
        let lost = error.is_closed() || error.is_canceled() || error.is_incomplete_message();
        let again = match unsent.or(copy.filter(|_| lost)) {
            Some(request) if kept => request,
            _ => return Err(Failure::Answer(error)),
        };
        self.open.lock().await.take();
        let (_, attempt) = self.attempt(name, again).await?;
        attempt.map_err(|(error, _)| Failure::Answer(error))
    }

    /// One try. Also says whether the connection had been used before.
    async fn attempt(&self, name: Option<&str>, request: Request<Body>) -> Result<(bool, Attempt), Failure> {
        let mut slot = self.open.lock().await;
        let through = self.shared.proxy.is_some() && self.proven.is_none();
        let usable =
            slot.as_ref().is_some_and(|open| open.usable() && (!through || open.name.as_deref() == name));
        if !usable {
            *slot = Some(self.dial(name).await?);
        }
        let open = slot.as_mut().expect("it was made just now");
        match &mut open.sender {
            Sender::Http2(sender) => {
                let mut sender = sender.clone();
                drop(slot);
                Ok((usable, sender.try_send_request(request).await.map_err(unsent)))
            }
            Sender::Http1(sender) => {
                // Requests of one HTTP/1 connection follow each other, so that nobody else waits for this lock.
                let sent = match sender.ready().await {
                    Ok(()) => sender.try_send_request(request).await.map_err(unsent),
                    Err(error) => Err((error, Some(request))),
                };
                Ok((usable, sent))
            }
        }
    }

    async fn dial(&self, name: Option<&str>) -> Result<Open, Failure> {
        let Some(proven) = &self.proven else {
            let stream =
                proxy::reach(&self.shared, self.destination, name).await.map_err(Failure::Connect)?;
            return handshake(stream, self.protocol, name.map(str::to_owned)).await;
        };
        let offers = match self.protocol {
            Protocol::Http1 => vec![b"http/1.1".to_vec()],
            Protocol::Http2 => vec![b"h2".to_vec()],
        };
        let (stream, chosen) = secure(&self.shared, self.destination, proven, offers).await?;
        if (chosen.as_deref() == Some(b"h2")) != (self.protocol == Protocol::Http2) {
            return Err(Failure::Changed);
        }
        handshake(stream, self.protocol, None).await
    }
}

type Attempt = Result<Response<Incoming>, (hyper::Error, Option<Request<Body>>)>;

fn unsent(
    mut failed: hyper::client::conn::TrySendError<Request<Body>>,
) -> (hyper::Error, Option<Request<Body>>) {
    let request = failed.take_message();
    (failed.into_error(), request)
}

impl Open {
    fn usable(&self) -> bool {
        match &self.sender {
            Sender::Http1(sender) => !sender.is_closed(),
            Sender::Http2(sender) => !sender.is_closed(),
        }
    }
}

/// Safe methods without a body may be sent twice.
fn replayable(request: &Request<Body>) -> bool {
    request.method().is_safe()
        && request.body().is_end_stream()
        && request.extensions().get::<hyper::upgrade::OnUpgrade>().is_none()
}

fn without_body(request: &Request<Body>) -> Request<Body> {
    let mut copy = Request::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    *copy.version_mut() = request.version();
    copy
}

async fn secure(
    shared: &Shared,
    destination: SocketAddr,
    name: &str,
    offers: Vec<Vec<u8>>,
) -> Result<(Box<dyn Stream>, Option<Vec<u8>>), Failure> {
    let stream = proxy::reach(shared, destination, Some(name)).await.map_err(Failure::Connect)?;
    let server =
        ServerName::try_from(name.to_owned()).map_err(|error| Failure::Handshake(io::Error::other(error)))?;
    let connector = TlsConnector::from(shared.trust.client(offers));
    let secured = tokio::time::timeout(HANDSHAKE, connector.connect(server, stream)).await;
    let stream = secured
        .map_err(|_| Failure::Handshake(io::ErrorKind::TimedOut.into()))?
        .map_err(Failure::Handshake)?;
    let chosen = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
    Ok((Box::new(stream), chosen))
}

async fn handshake(
    stream: Box<dyn Stream>,
    protocol: Protocol,
    name: Option<String>,
) -> Result<Open, Failure> {
    let io = TokioIo::new(stream);
    match protocol {
        Protocol::Http1 => {
            let mut builder = http1::Builder::new();
            builder
                .preserve_header_case(true)
                .max_buf_size(MAX_HEAD)
                .max_header_size(MAX_HEAD)
                .max_headers(MAX_HEADERS);
            let (sender, connection) = builder.handshake(io).await.map_err(Failure::Answer)?;
            // Its errors reach whoever waits for an answer.
            let driver = Driver(tokio::spawn(async move { drop(connection.with_upgrades().await) }));
            Ok(Open { sender: Sender::Http1(sender), _driver: driver, name })
        }
        Protocol::Http2 => {
            let mut builder = http2::Builder::new(TokioExecutor::new());
            builder
                .timer(TokioTimer::new())
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(CONNECTION_WINDOW)
                .max_send_buf_size(SEND_BUFFER)
                .max_header_list_size(u32::try_from(MAX_HEAD).expect("it is small"))
                .keep_alive_interval(PING);
            let (sender, connection) = builder.handshake(io).await.map_err(Failure::Answer)?;
            let driver = Driver(tokio::spawn(async move { drop(connection.await) }));
            Ok(Open { sender: Sender::Http2(sender), _driver: driver, name })
        }
    }
}
