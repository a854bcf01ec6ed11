//! One request to one backend, body and answer streamed.
//!
//! In two steps, so that a caller can try another way in while it still has the request: `connect`, then `forward`.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Body;

use crate::BoxError;
use crate::body::{Length, ResponseBody, Source};
use crate::drain::{Active, Counts, Drain, Kind};
use crate::error::{ConnectError, ForwardError};
use crate::exchange::{Exchange, Failure};
use crate::head::Answer;
use crate::headers::HeaderEdits;
use crate::limits::Limits;
use crate::pool::{Connection, Pool};
use crate::pulse::{Beat, Pulse};
use crate::upgrade;

/// Forwards requests and owns the connections to backends. Clones share everything.
#[derive(Clone, Debug)]
pub struct Forwarder {
    pub(crate) pool: Arc<Pool>,
    pub(crate) drain: Drain,
    pub(crate) limits: Limits,
}

/// A connection that is ready for exactly one request.
#[derive(Debug)]
pub struct Lease {
    pub(crate) connection: Connection,
    pub(crate) forwarder: Forwarder,
    pub(crate) active: Active,
    pub(crate) pulse: Option<Pulse>,
}

impl Forwarder {
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self { pool: Pool::new(limits.clone()), drain: Drain::default(), limits }
    }

    /// A connection to `target`, an unused one if there is any.
    pub async fn connect(&self, target: SocketAddr) -> Result<Lease, ConnectError> {
        let active = self.drain.enter(Kind::Request).ok_or(ConnectError::Draining)?;
        let connection = match self.pool.take(target) {
            Some(connection) => connection,
            None => self.pool.dial(target).await?,
        };
        Ok(Lease { connection, forwarder: self.clone(), active, pulse: None })
    }

    /// A connection of its own, for requests that will keep it.
    pub async fn dial(&self, target: SocketAddr) -> Result<Lease, ConnectError> {
        let active = self.drain.enter(Kind::Request).ok_or(ConnectError::Draining)?;
        let connection = self.pool.dial(target).await?;
        Ok(Lease { connection, forwarder: self.clone(), active, pulse: None })
    }

    /// Cuts every connection to this address and forgets it. To be called when the machine behind it is removed, before
    /// the address can belong to another.
    pub fn forget(&self, address: IpAddr) {
        self.pool.forget(address);
    }

    /// What is in flight.
    #[must_use]
    pub fn counts(&self) -> Counts {
        self.drain.counts()
    }

    /// Refuses new requests, lets those in flight end for at most `grace`, then cuts the rest. Returns what was cut.
    pub async fn drain(&self, grace: Duration) -> Counts {
        let cut = self.drain.close(grace).await;
        self.pool.close().await;
        cut
    }
}

impl Lease {
    /// Tells somebody for as long as bytes move.
    #[must_use]
    pub fn watched(self, pulse: Option<Pulse>) -> Self {
        Self { pulse, ..self }
    }

    /// Sends the request and returns the answer's head with its body still to come. The request's URI is the origin form
    /// to be sent; its bytes are not changed. `Host` becomes the target unless the edits set it.
    pub async fn forward<B>(
        self,
        request: Request<B>,
        edits: HeaderEdits,
    ) -> Result<Response<ResponseBody>, ForwardError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        let Self { connection, forwarder, active, pulse } = self;
        let mut exchange = Exchange::new(connection, request, edits, None);
        exchange.beat = Beat::of(pulse);
        let head = answer(&forwarder, &mut exchange).await?;
        Ok(respond(head, exchange, &forwarder, active))
    }

    /// Like [`Lease::forward`], for a request that asks for an upgrade on a connection from [`Forwarder::dial`]. If the
    /// backend agrees, both connections become one pipe after the returned 101 was written; if not, its answer is
    /// returned like any other.
    pub async fn upgrade<B>(
        self,
        request: Request<B>,
        edits: HeaderEdits,
    ) -> Result<Response<ResponseBody>, ForwardError>
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<BoxError>,
    {
        upgrade::forward(self, request, edits).await
    }
}

/// Sends on the given connection; if that was a kept one which the backend closed at the same moment, once more on a new
/// one, provided the backend cannot have acted on the first.
pub(crate) async fn answer(forwarder: &Forwarder, exchange: &mut Exchange) -> Result<Answer, ForwardError> {
    let limit = forwarder.limits.response_head;
    match exchange.answer(limit).await {
        Ok(answer) => Ok(answer),
        Err(Failure::Closed(_)) if exchange.may_repeat() && !forwarder.drain.is_closing() => {
            exchange.again(forwarder.pool.dial(exchange.connection.target).await?);
            Ok(exchange.answer(limit).await?)
        }
        Err(failure) => Err(failure.into()),
    }
}

/// The response as the client gets it.
pub(crate) fn respond(
    head: Answer,
    exchange: Exchange,
    forwarder: &Forwarder,
    active: Active,
) -> Response<ResponseBody> {
    let bodiless = exchange.is_to_head()
        || head.status.is_informational()
        || matches!(head.status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    let length = if bodiless { Length::Unsaid } else { Length::OfBody };
    let keeps = head.keeps && exchange.may_be_followed();
    let source = Source {
        exchange,
        pool: Arc::clone(&forwarder.pool),
        active,
        keeps,
        patience: forwarder.limits.response_head,
    };
    let mut response = Response::new(ResponseBody::new(source, head.framing, length));
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers;
    *response.extensions_mut() = head.extensions;
    response
}
