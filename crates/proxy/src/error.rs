//! What can go wrong, in the distinctions that callers answer differently.

use std::io;

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

/// No response head. After the head, failures show as an aborted body.
#[derive(Debug, thiserror::Error)]
pub enum ForwardError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("the backend did not answer in time")]
    Timeout,
    #[error("the backend's answer is not HTTP: {0}")]
    InvalidResponse(#[source] hyper::Error),
    #[error("the backend dropped the connection: {0}")]
    Dropped(#[source] hyper::Error),
    /// The request body ended early; nobody is left to answer.
    #[error("the client went away")]
    ClientGone,
}

impl ForwardError {
    pub(crate) fn from_hyper(error: hyper::Error) -> Self {
        if error.is_parse() || error.is_parse_too_large() {
            return Self::InvalidResponse(error);
        }
        Self::Dropped(error)
    }
}
