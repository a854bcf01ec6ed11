//! One request to one backend, body and answer streamed.
//!
//! In two steps, so that a caller can try another way in while it still has the request: `connect`, then `forward`.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{HOST, HeaderValue};
use http::{Method, Request, Response, StatusCode, Version};
use http_body::Body;
use hyper::body::Incoming;

use crate::BoxError;
use crate::body::{Length, RequestBody, ResponseBody, Upload};
use crate::drain::{Active, Counts, Drain, Kind};
use crate::error::{ConnectError, ForwardError};
use crate::headers::{self, HeaderEdits};
use crate::limits::Limits;
use crate::pool::{Connection, Pool};
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
        Ok(Lease { connection, forwarder: self.clone(), active })
    }

    /// A connection of its own, for requests that will keep it.
    pub async fn dial(&self, target: SocketAddr) -> Result<Lease, ConnectError> {
        let active = self.drain.enter(Kind::Request).ok_or(ConnectError::Draining)?;
        let connection = self.pool.dial(target).await?;
        Ok(Lease { connection, forwarder: self.clone(), active })
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
        let upload = Upload::new();
        let request = prepare(request, edits, self.connection.target, &upload);
        let head = request.method() == Method::HEAD;
        let (response, connection) = exchange(&self.forwarder, self.connection, request, &upload).await?;
        let (cut, active) = (connection.cut.clone(), self.active);
        self.forwarder.pool.give_back(connection);
        Ok(finish(response, |status, incoming| {
            ResponseBody::new(incoming, cut, active, length_of(head, status))
        }))
    }
}

/// The request as the backend gets it.
pub(crate) fn prepare<B>(
    request: Request<B>,
    edits: HeaderEdits,
    target: SocketAddr,
    upload: &Arc<Upload>,
) -> Request<RequestBody>
where
    B: Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError>,
{
    let (mut parts, body) = request.into_parts();
    let has_host = edits.set.iter().any(|(name, _)| name == HOST);
    headers::clean_request(&mut parts.headers, edits);
    if !has_host && let Ok(host) = HeaderValue::try_from(target.to_string()) {
        parts.headers.insert(HOST, host);
    }
    headers::frame_request(&mut parts.headers, !body.is_end_stream());
    parts.version = Version::HTTP_11;
    // The client's connection has state in here (its upgrade, its peer) that means nothing to the backend's.
    parts.extensions.clear();
    Request::from_parts(parts, RequestBody::new(body, Arc::clone(upload)))
}

/// The response as the client gets it, before the body is wrapped.
pub(crate) fn finish<B>(
    response: Response<Incoming>,
    wrap: impl FnOnce(StatusCode, Incoming) -> B,
) -> Response<B> {
    let (mut parts, incoming) = response.into_parts();
    headers::clean_response(&mut parts.headers);
    parts.version = Version::HTTP_11;
    parts.extensions.clear();
    let body = wrap(parts.status, incoming);
    Response::from_parts(parts, body)
}

pub(crate) fn length_of(head: bool, status: StatusCode) -> Length {
    let bodiless = head
        || status.is_informational()
        || matches!(status, StatusCode::NO_CONTENT | StatusCode::NOT_MODIFIED);
    if bodiless { Length::Unsaid } else { Length::OfBody }
}

/// Sends on the given connection; if that was a kept one which the backend closed at the same moment, once more on a new
/// one, provided the backend cannot have acted on the first.
async fn exchange(
    forwarder: &Forwarder,
    connection: Connection,
    request: Request<RequestBody>,
    upload: &Arc<Upload>,
) -> Result<(Response<Incoming>, Connection), ForwardError> {
    let (target, reused) = (connection.target, connection.reused);
    let replay = (reused && replayable(&request)).then(|| copy_without_body(&request, upload));
    let failure = match send(forwarder, connection, request, upload).await {
        Ok(done) => return Ok(done),
        Err(failure) => failure,
    };
    let again = match failure.unsent.or(replay.filter(|_| failure.closed)) {
        Some(request) if reused && !forwarder.drain.is_closing() => *request,
        _ => return Err(failure.error),
    };
    let connection = forwarder.pool.dial(target).await?;
    send(forwarder, connection, again, upload).await.map_err(|failure| failure.error)
}

/// Safe methods without a body may be sent twice.
fn replayable(request: &Request<RequestBody>) -> bool {
    request.method().is_safe() && request.body().is_end_stream()
}

fn copy_without_body(request: &Request<RequestBody>, upload: &Arc<Upload>) -> Box<Request<RequestBody>> {
    let mut copy = Request::new(RequestBody::empty(Arc::clone(upload)));
    copy.method_mut().clone_from(request.method());
    copy.uri_mut().clone_from(request.uri());
    copy.headers_mut().clone_from(request.headers());
    Box::new(copy)
}

pub(crate) struct SendFailure {
    pub(crate) error: ForwardError,
    /// The request, if not a byte of it was written.
    unsent: Option<Box<Request<RequestBody>>>,
    /// The backend closed the connection without a word.
    closed: bool,
}

pub(crate) async fn send(
    forwarder: &Forwarder,
    mut connection: Connection,
    request: Request<RequestBody>,
    upload: &Upload,
) -> Result<(Response<Incoming>, Connection), SendFailure> {
    let sent = tokio::select! {
        sent = connection.sender.try_send_request(request) => sent,
        () = upload.stalled(forwarder.limits.response_head) => {
            return Err(SendFailure { error: ForwardError::Timeout, unsent: None, closed: false });
        }
    };
    match sent {
        Ok(response) => Ok((response, connection)),
        Err(mut failed) => {
            let unsent = failed.take_message().map(Box::new);
            let cause = failed.into_error();
            let cut = connection.cut.is_cancelled();
            let closed = !cut && (cause.is_incomplete_message() || cause.is_closed() || cause.is_canceled());
            let error = if upload.client_failed() {
                ForwardError::ClientGone
            } else if cut {
                ForwardError::Connect(ConnectError::Removed)
            } else {
                ForwardError::from_hyper(cause)
            };
            Err(SendFailure { error, unsent: unsent.filter(|_| !cut), closed })
        }
    }
}

impl Lease {
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
