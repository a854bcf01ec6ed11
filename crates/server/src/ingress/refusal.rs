//! Why a request does not reach its sandbox, as HTTP and as WebSocket clients are told.

use axum::Json;
use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use sandglass_api::error::{ErrorBody, FieldError, VALIDATION_ERROR, ValidationBody};
use sandglass_proxy::{ConnectError, ForwardError};

use crate::telemetry::metrics::Proxied;

/// A refusal. [`Refusal::status`] and [`Refusal::code`] are what clients act on; the text is for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("no such route")]
    NoRoute,
    #[error("method not allowed")]
    Method,
    #[error("the port is not a number")]
    PortNotANumber,
    #[error("the port is not in 1 to 65535")]
    PortOutOfRange,
    #[error("the request target is malformed")]
    TargetMalformed,
    #[error("the WebSocket handshake is incomplete")]
    Handshake,
    #[error("an API key or the sandbox's access token is required")]
    MissingKey,
    #[error("the API key or access token is wrong")]
    InvalidKey,
    #[error("this link has expired or is wrong; ask for a new one")]
    Link,
    #[error("this sandbox requires its secure access token")]
    SecureAccess,
    #[error("the API key cannot be checked at the moment")]
    TenantProvider,
    #[error("sandbox not found")]
    NotFound,
    #[error("the runtime cannot be reached, so it is not known whether this sandbox exists")]
    Unknown,
    #[error("sandbox is not running")]
    NotRunning,
    #[error("no port of this host leads to the sandbox")]
    Unmapped,
    #[error("this sandbox was created without a network policy, so it has no egress enforcer")]
    NoEnforcer,
    #[error("the sandbox's address is not known yet")]
    AddressUnknown,
    #[error("`expires` cannot be combined with `use_server_proxy`")]
    ExpiresWithProxy,
    #[error("signed endpoints are not supported by this runtime")]
    ExpiresUnsupported,
    #[error("`expires` must be a Unix second in the future, at most 18446744073709551615")]
    ExpiresInvalid,
    #[error("`expires` needs signing keys: configure [ingress.secure_access]")]
    ExpiresUnsigned,
    #[error(
        "`expires` is too late for a host name; ask for an earlier one, or use the route mode \"header\" or \"uri\""
    )]
    ExpiresTooLate,
    #[error(
        "the host name of this route would have a label of more than 63 characters; use the route mode \"header\" or \"uri\""
    )]
    LabelTooLong,
    #[error("sandbox is paused")]
    Paused,
    #[error("sandbox is paused and could not be resumed")]
    NotWoken,
    #[error("sandbox is being resumed; try again")]
    WakeSlow,
    #[error("too many requests wait for sandboxes to be resumed; try again")]
    WakeCrowded,
    #[error("sandbox is still starting")]
    Starting,
    #[error("sandbox has ended")]
    Ended,
    #[error("cannot connect to this port of the sandbox")]
    Unreachable,
    #[error("the sandbox dropped the connection or sent an invalid response")]
    BadResponse,
    #[error("the sandbox did not respond in time")]
    Timeout,
    #[error("the server is shutting down")]
    ShuttingDown,
}

impl Refusal {
    #[must_use]
    pub fn status(self) -> StatusCode {
        match self {
            Self::NoRoute | Self::NotFound | Self::AddressUnknown => StatusCode::NOT_FOUND,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::PortNotANumber => StatusCode::UNPROCESSABLE_ENTITY,
            Self::PortOutOfRange
            | Self::TargetMalformed
            | Self::Handshake
            | Self::ExpiresWithProxy
            | Self::ExpiresUnsupported
            | Self::ExpiresInvalid
            | Self::ExpiresUnsigned
            | Self::ExpiresTooLate
            | Self::LabelTooLong
            | Self::NoEnforcer => StatusCode::BAD_REQUEST,
            Self::MissingKey | Self::InvalidKey | Self::Link | Self::SecureAccess => StatusCode::UNAUTHORIZED,
            Self::NotRunning => StatusCode::CONFLICT,
            Self::Paused
            | Self::NotWoken
            | Self::Starting
            | Self::Ended
            | Self::Unreachable
            | Self::BadResponse => StatusCode::BAD_GATEWAY,
            Self::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Self::Unmapped => StatusCode::INTERNAL_SERVER_ERROR,
            Self::ShuttingDown
            | Self::TenantProvider
            | Self::Unknown
            | Self::WakeSlow
            | Self::WakeCrowded => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    #[must_use]
    pub fn code(self) -> &'static str {
        match self {
            Self::NoRoute => "GENERAL::NOT_FOUND",
            Self::Method => "GENERAL::METHOD_NOT_ALLOWED",
            Self::PortNotANumber => VALIDATION_ERROR,
            Self::PortOutOfRange => "DOCKER::INVALID_PORT",
            Self::TargetMalformed | Self::Handshake => "GENERAL::UNKNOWN_ERROR",
            Self::MissingKey => "MISSING_API_KEY",
            Self::InvalidKey | Self::Link => "INVALID_API_KEY",
            Self::SecureAccess => "MISSING_OR_INVALID_SECURE_ACCESS",
            Self::TenantProvider => "TENANT_PROVIDER_UNAVAILABLE",
            Self::NotFound => "DOCKER::SANDBOX_NOT_FOUND",
            Self::NotRunning => "DOCKER::SANDBOX_NOT_RUNNING",
            Self::AddressUnknown => "KUBERNETES::POD_IP_NOT_AVAILABLE",
            Self::ExpiresWithProxy
            | Self::ExpiresInvalid
            | Self::ExpiresUnsigned
            | Self::ExpiresTooLate
            | Self::LabelTooLong => "SANDBOX::INVALID_PARAMETER",
            Self::ExpiresUnsupported | Self::NoEnforcer => "SANDBOX::API_NOT_SUPPORTED",
            Self::Unknown => "DOCKER::SANDBOX_QUERY_FAILED",
            Self::Unmapped => "DOCKER::NETWORK_MODE_ENDPOINT_UNAVAILABLE",
            Self::Paused | Self::Starting | Self::Ended | Self::Unreachable => "BACKEND_CONNECTION_FAILED",
            Self::BadResponse => "BACKEND_RESPONSE_FAILED",
            Self::Timeout => "BACKEND_TIMEOUT",
            Self::NotWoken => "DOCKER::SANDBOX_RESUME_FAILED",
            Self::ShuttingDown | Self::WakeSlow | Self::WakeCrowded => "GENERAL::UNAVAILABLE",
        }
    }

    /// How metrics count it: whether the server said no, or could not get through.
    pub(super) fn outcome(self) -> Proxied {
        match self {
            Self::Unreachable | Self::BadResponse | Self::Timeout => Proxied::Unreachable,
            _ => Proxied::Refused,
        }
    }

    /// WebSocket clients are told with a close frame: 1008 for what they did, 1011 for what happened here.
    pub(super) fn close_code(self) -> u16 {
        match self {
            Self::MissingKey | Self::InvalidKey | Self::SecureAccess => 1008,
            _ => 1011,
        }
    }
}

impl From<ConnectError> for Refusal {
    fn from(error: ConnectError) -> Self {
        match error {
            ConnectError::Draining => Self::ShuttingDown,
            _ => Self::Unreachable,
        }
    }
}

impl From<ForwardError> for Refusal {
    fn from(error: ForwardError) -> Self {
        match error {
            ForwardError::Connect(error) => error.into(),
            ForwardError::Timeout => Self::Timeout,
            ForwardError::InvalidResponse(_) | ForwardError::Dropped(_) | ForwardError::ClientGone => {
                Self::BadResponse
            }
        }
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let (code, message) = (self.code().to_owned(), self.to_string());
        if self == Self::PortNotANumber {
            let field = FieldError {
                kind: "int_parsing".to_owned(),
                loc: vec!["path".into(), "port".into()],
                msg: message.clone(),
            };
            return (self.status(), Json(ValidationBody { code, message, detail: vec![field] }))
                .into_response();
        }
        let mut response = (self.status(), Json(ErrorBody { code, message })).into_response();
        if matches!(self, Self::WakeSlow | Self::WakeCrowded) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self == Self::Method {
            let allow = HeaderValue::from_static("GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS");
            response.headers_mut().insert(header::ALLOW, allow);
        }
        response
    }
}
