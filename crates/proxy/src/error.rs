//! What can go wrong, in the distinctions that callers answer differently.

use std::io;

use crate::chunked::InvalidChunk;

/// No connection to the backend.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// Nothing listens there. Apart from the others, because the caller may know another way in.
    #[error("connection refused")]
    Refused,
    #[error("connect timed out")]
    Timeout,
    #[error("cannot connect: {0}")]
    Unreachable(#[source] io::Error),
    #[error("the target was removed")]
    Removed,
    /// This forwarder no longer takes requests.
    #[error("shutting down")]
    Draining,
}

impl From<io::Error> for ConnectError {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::ConnectionRefused => Self::Refused,
            io::ErrorKind::TimedOut => Self::Timeout,
            _ => Self::Unreachable(error),
        }
    }
}

/// The first bytes of the backend's answer are no head of an HTTP/1 answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidHead {
    #[error("{0}")]
    Syntax(httparse::Error),
    #[error("the head is too large")]
    TooLarge,
    #[error("the length of the body is given in two ways, or in one that is no length")]
    Length,
    #[error("the body has a transfer coding that nobody asked for")]
    Coding,
    #[error("the protocol was changed and nobody asked for that")]
    Upgrade,
    #[error("the protocol was changed within the request")]
    Early,
}

/// No response head. After the head, failures show as an aborted body.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the backend did not answer in time")]
    Timeout,
    #[error("the backend's answer is not HTTP: {0}")]
    InvalidResponse(#[source] InvalidHead),
    #[error("the backend dropped the connection: {0}")]
    Dropped(#[source] io::Error),
    /// The request body ended early; nobody is left to answer.
    #[error("the client went away")]
    ClientGone,
}

/// Why a response body ended before its end.
#[derive(Debug, thiserror::Error)]
pub enum BodyError {
    #[error("the backend dropped the connection within the body: {0}")]
    Backend(#[source] io::Error),
    #[error("the backend's body is not what its head says: {0}")]
    Invalid(#[from] InvalidChunk),
    /// The target was forgotten or the forwarder shut down.
    #[error("the connection to the backend was cut")]
    Cut,
    /// The request body ended early, and with it the exchange.
    #[error("the client went away")]
    ClientGone,
}
