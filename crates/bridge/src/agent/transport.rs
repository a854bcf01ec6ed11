//! How calls reach the server.

use std::future::Future;
use std::io;
use std::pin::Pin;

use bytes::Bytes;
use futures_util::Stream;

use crate::wire::LeaseId;

/// One call. Who speaks and the token are the transport's to add.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub method: http::Method,
    pub path: String,
    pub lease: Option<LeaseId>,
    /// Position to resume the stream from.
    pub last_event_id: Option<String>,
    pub body: Bytes,
}

/// An answer with its whole body.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    pub status: u16,
    pub body: Bytes,
}

/// A body that comes in pieces.
pub type Chunks = Pin<Box<dyn Stream<Item = io::Result<Bytes>> + Send>>;

/// No answer: the server may or may not have seen the call.
#[derive(Debug, thiserror::Error)]
pub enum TransportError {
    #[error("cannot reach the server")]
    Connect(#[source] io::Error),
    #[error("the connection to the server broke")]
    Broken(#[source] hyper::Error),
    #[error("the server did not answer in time")]
    Timeout,
    #[error("the server's answer is larger than it may be")]
    TooLarge,
    #[error("the call cannot be written as a request")]
    Request(#[from] http::Error),
}

/// Carries calls. Cheap to clone; clones share connections.
pub trait Transport: Clone + Send + Sync + 'static {
    /// One call and its whole answer.
    fn call(&self, request: Request) -> impl Future<Output = Result<Answer, TransportError>> + Send;

    /// A call whose answer, when it is 200, is a stream. Other answers are whole.
    fn open(
        &self,
        request: Request,
    ) -> impl Future<Output = Result<Result<Chunks, Answer>, TransportError>> + Send;
}
