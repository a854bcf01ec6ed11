//! Why a request is refused before anybody looked at what it asks for.

use http::StatusCode;

/// What is wrong with the form of a request. The connection is closed after the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the request line is not `METHOD target HTTP/1.1`")]
    RequestLine,
    #[error("lines of a request end with CR LF, and neither byte stands alone")]
    LineEnding,
    #[error("a header field is not `name: value` on one line")]
    Field,
    #[error("a request has exactly one Host, which is a name or an address with an optional port")]
    Host,
    #[error("the request target names another host than the Host field")]
    TargetHost,
    #[error("Content-Length is not one number")]
    ContentLength,
    #[error("Content-Length and Transfer-Encoding exclude each other")]
    TwoLengths,
    #[error("Transfer-Encoding is not `chunked`")]
    TransferEncoding,
    #[error("transfer codings other than `chunked` are not supported")]
    TransferCoding,
    #[error("the chunks of the body are malformed")]
    Chunk,
    #[error("CONNECT is not supported")]
    Connect,
    #[error("the only protocol that CONNECT can ask for is `websocket`")]
    Protocol,
    #[error("this version of HTTP is not supported")]
    Version,
    #[error("the request target is too long")]
    TargetTooLong,
    #[error("the header is too large")]
    HeadTooLarge,
    #[error("the request did not arrive in time")]
    TooSlow,
}

impl Malformed {
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::RequestLine
            | Self::LineEnding
            | Self::Field
            | Self::Host
            | Self::TargetHost
            | Self::ContentLength
            | Self::TwoLengths
            | Self::TransferEncoding
            | Self::Chunk => StatusCode::BAD_REQUEST,
            Self::Connect => StatusCode::METHOD_NOT_ALLOWED,
            Self::TransferCoding | Self::Protocol => StatusCode::NOT_IMPLEMENTED,
            Self::Version => StatusCode::HTTP_VERSION_NOT_SUPPORTED,
            Self::TargetTooLong => StatusCode::URI_TOO_LONG,
            Self::HeadTooLarge => StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE,
            Self::TooSlow => StatusCode::REQUEST_TIMEOUT,
        }
    }
}
