//! Answers in the shapes clients parse: `{code,message}` errors, empty 200 with a length, JSON, event streams.

use http::header::{CACHE_CONTROL, CONNECTION, CONTENT_LENGTH, CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;

use super::body::Body;
use crate::events;

pub type Reply = Response<Body>;
pub type Outcome = Result<Reply, Failure>;

pub const JSON: &str = "application/json; charset=utf-8";
pub const TEXT: &str = "text/plain; charset=utf-8";

/// The codes of the error body, exactly as clients know them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Code {
    InvalidRequestBody,
    MissingQuery,
    RuntimeError,
    InvalidFile,
    InvalidFileMetadata,
    InvalidFileContent,
    FileNotFound,
    ContextNotFound,
    AlreadyConnected,
    ViewerNotRunning,
    ServiceUnavailable,
    FilesystemIdentityUnavailable,
    NotSupported,
    SessionNotFound,
    NotFound,
    AlreadyInitialized,
    Unknown,
}

impl Code {
    fn text(self) -> &'static str {
        match self {
            Code::InvalidRequestBody => "INVALID_REQUEST_BODY",
            Code::MissingQuery => "MISSING_QUERY",
            Code::RuntimeError => "RUNTIME_ERROR",
            Code::InvalidFile => "INVALID_FILE",
            Code::InvalidFileMetadata => "INVALID_FILE_METADATA",
            Code::InvalidFileContent => "INVALID_FILE_CONTENT",
            Code::FileNotFound => "FILE_NOT_FOUND",
            Code::ContextNotFound => "CONTEXT_NOT_FOUND",
            Code::AlreadyConnected => "ALREADY_CONNECTED",
            Code::ViewerNotRunning => "VIEWER_NOT_RUNNING",
            Code::ServiceUnavailable => "SERVICE_UNAVAILABLE",
            Code::FilesystemIdentityUnavailable => "FILESYSTEM_IDENTITY_UNAVAILABLE",
            Code::NotSupported => "NOT_SUPPORTED",
            Code::SessionNotFound => "SESSION_NOT_FOUND",
            Code::NotFound => "NOT_FOUND",
            Code::AlreadyInitialized => "ALREADY_INITIALIZED",
            Code::Unknown => "UNKNOWN",
        }
    }
}

/// A refused or failed request.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    pub status: StatusCode,
    pub code: Code,
    pub message: String,
}

impl Failure {
    pub fn new(status: StatusCode, code: Code, message: impl Into<String>) -> Self {
        let message: String = message.into();
        // Clients insist on both keys; an empty message would be dropped by some of them.
        let message = if message.is_empty() { "unknown error".to_owned() } else { message };
        Failure { status, code, message }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Code::InvalidRequestBody, message)
    }

    pub fn missing_query(name: &str) -> Self {
        Self::new(StatusCode::BAD_REQUEST, Code::MissingQuery, format!("missing query parameter '{name}'"))
    }

    pub fn runtime(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, Code::RuntimeError, message)
    }

    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, Code::FileNotFound, message)
    }

    pub fn no_context(message: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, Code::ContextNotFound, message)
    }

    /// A bound is reached; the same request may succeed later.
    pub fn unavailable(message: impl Into<String>) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, Code::ServiceUnavailable, message)
    }

    /// A file system error: 404 only when the path is what is missing.
    pub fn io(doing: &str, path: &std::path::Path, error: &std::io::Error) -> Self {
        let path = path.display();
        match error.kind() {
            std::io::ErrorKind::NotFound => Self::not_found(format!("{doing} {path}: file not found")),
            std::io::ErrorKind::StorageFull => {
                Self::runtime(format!("{doing} {path}: no space left on device"))
            }
            std::io::ErrorKind::PermissionDenied => {
                // The other error of the two says it in words that nobody searches for.
                let reason =
                    plain(error).replace("operation not permitted", "no permission for this operation");
                Self::runtime(format!("{doing} {path}: {reason}"))
            }
            _ => Self::runtime(format!("{doing} {path}: {}", plain(error))),
        }
    }

    /// Turns a 404 into a 500 where the contract knows no 404.
    pub fn as_runtime(mut self) -> Self {
        self.status = StatusCode::INTERNAL_SERVER_ERROR;
        self.code = Code::RuntimeError;
        self
    }

    pub fn into_reply(self) -> Reply {
        #[derive(Serialize)]
        struct Shape<'a> {
            code: &'a str,
            message: &'a str,
        }
        json_reply(self.status, &Shape { code: self.code.text(), message: &self.message })
    }
}

/// The system's text for an error, lower case and without Rust's "(os error n)".
pub fn plain(error: &std::io::Error) -> String {
    let text = error.to_string();
    let text = text.split(" (os error").next().unwrap_or(&text);
    let mut chars = text.chars();
    match chars.next() {
        Some(first) => first.to_lowercase().chain(chars).collect(),
        None => text.to_owned(),
    }
}

pub fn json(value: &impl Serialize) -> Reply {
    json_reply(StatusCode::OK, value)
}

pub fn json_reply(status: StatusCode, value: &impl Serialize) -> Reply {
    match serde_json::to_vec(value) {
        Ok(bytes) => with_type(status, JSON, Body::Full(bytes.into())),
        Err(_) => bare(StatusCode::INTERNAL_SERVER_ERROR),
    }
}

/// 200 without a body; the explicit length is what keeps a JavaScript client from parsing it.
pub fn empty() -> Reply {
    bare(StatusCode::OK)
}

pub fn bare(status: StatusCode) -> Reply {
    let mut reply = Response::new(Body::Empty);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_LENGTH, HeaderValue::from_static("0"));
    reply
}

pub fn text(status: StatusCode, text: impl Into<String>) -> Reply {
    with_type(status, TEXT, Body::from(text.into()))
}

pub fn with_type(status: StatusCode, content_type: &'static str, body: Body) -> Reply {
    let mut reply = Response::new(body);
    *reply.status_mut() = status;
    reply.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(content_type));
    reply
}

/// The headers every event stream has.
pub fn event_stream(body: Body) -> Reply {
    let mut reply = with_type(StatusCode::OK, events::CONTENT_TYPE, body);
    let headers = reply.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    headers.insert(CONNECTION, HeaderValue::from_static("keep-alive"));
    headers.insert(HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    reply
}
