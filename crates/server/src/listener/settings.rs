//! What a listener is told.

use std::{sync::Arc, time::Duration};

use axum::{Router, body::Body, response::Response};
use futures_util::{FutureExt as _, future::BoxFuture};
use http::{HeaderValue, Request, header::CONTENT_LENGTH};
use http_body::Body as _;
use tower::ServiceExt as _;

use super::{certificates::Certificates, malformed::Malformed};

/// How a request that is not understood is answered, in the words of whoever listens.
pub type Refuse = fn(Malformed) -> Response;

/// Answers requests.
pub trait Answers: Send + Sync + 'static {
    /// The answer to a request that is in order. It has `ConnectInfo<SocketAddr>` and [`Scheme`] among its extensions.
    fn answer(&self, request: Request<Body>) -> BoxFuture<'_, Response>;
}

/// Completes an answer as a router does for its own: a length that is known is said, and then the body left out that nobody asked for.
pub fn whole_head(response: &mut Response, bodiless: bool) {
    if let Some(length) = response.body().size_hint().exact()
        && !response.headers().contains_key(CONTENT_LENGTH)
    {
        response.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from(length));
    }
    if bodiless {
        *response.body_mut() = Body::empty();
    }
}

impl Answers for Router {
    fn answer(&self, request: Request<Body>) -> BoxFuture<'_, Response> {
        let answered = self.clone().oneshot(request);
        answered.map(|answered| answered.unwrap_or_else(|never| match never {})).boxed()
    }
}

/// What answers on a listener, and under which rules.
#[derive(Clone)]
pub struct Serving {
    /// Gets every request that is in order.
    pub answers: Arc<dyn Answers>,
    pub refuse: Refuse,
    pub transport: Transport,
    pub limits: Limits,
}

impl std::fmt::Debug for Serving {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Serving").field("transport", &self.transport).finish_non_exhaustive()
    }
}

/// What connections consist of.
#[derive(Clone, Debug)]
pub enum Transport {
    Plain,
    Tls(Arc<Certificates>),
}

/// How a request came, as far as this process can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    Http,
    Https,
}

/// What connections may take. None of it applies to an answer or to an upgraded connection: they may be silent for days.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// How long a connection may be without a request.
    pub keep_alive: Duration,
    /// How long a head may take from its first byte to its last, and a TLS handshake altogether.
    pub head: Duration,
    /// How long a request body may be silent while nothing has been answered yet.
    pub body_silence: Duration,
    /// Bytes of one head. Also what is buffered for one connection before anything of its next request is passed on.
    pub head_bytes: usize,
    /// Fields of one head.
    pub head_fields: usize,
    /// Requests of one HTTP/2 connection at the same time.
    pub streams: u32,
    /// How long requests and upgraded connections may take once the listener is told to stop.
    pub drain: Duration,
    /// Open connections, upgraded ones included; the kernel queues what is beyond.
    pub connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            keep_alive: Duration::from_secs(330),
            head: Duration::from_secs(20),
            body_silence: Duration::from_secs(300),
            head_bytes: 64 << 10,
            head_fields: 128,
            streams: 256,
            drain: Duration::from_secs(5),
            connections: super::connection_limit(),
        }
    }
}
