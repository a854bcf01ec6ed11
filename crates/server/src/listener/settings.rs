//! What a listener is told.

use std::{sync::Arc, time::Duration};

use axum::{Router, response::Response};

use super::{certificates::Certificates, malformed::Malformed};

/// How a request that is not understood is answered, in the words of whoever listens.
pub type Refuse = fn(Malformed) -> Response;

/// What answers on a listener, and under which rules.
#[derive(Clone)]
pub struct Serving {
    /// Gets every request that is in order, with `ConnectInfo<SocketAddr>` and [`Scheme`] among its extensions.
    pub router: Router,
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
