//! The gateway's own answers: plain text, because they stand beside those of any application.

use axum::response::{IntoResponse, Response};
use http::{HeaderValue, StatusCode, header};
use sandglass_ingress::{Denied, RouteError};

use crate::ingress::Refusal;

/// Why a request does not reach its sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Refused {
    #[error(
        "no route: send the header OpenSandbox-Ingress-To or a Host of the form <sandbox id>-<port>.<domain>"
    )]
    NoRoute,
    #[error(transparent)]
    Route(#[from] RouteError),
    #[error("unknown route mode; start with --mode=header or --mode=uri")]
    Mode,
    #[error("method not supported")]
    Method,
    #[error("the request cannot be passed on")]
    Malformed,
    #[error("sandbox not found")]
    NotFound,
    #[error("sandbox is not ready")]
    NotReady,
    #[error("sandbox is paused")]
    Paused,
    #[error("sandbox could not be resumed in time")]
    NotWoken,
    #[error("too many requests wait for sandboxes to resume")]
    Crowded,
    #[error(transparent)]
    Denied(#[from] Denied),
    #[error("cannot connect to this port of the sandbox (BACKEND_CONNECTION_FAILED)")]
    Unreachable,
    #[error("cannot connect to this port of the sandbox for an upgrade (BACKEND_CONNECTION_FAILED)")]
    NoUpgrade,
    #[error("the sandbox dropped the connection or sent an invalid response (BACKEND_RESPONSE_FAILED)")]
    BadResponse,
    #[error("the gateway is shutting down")]
    ShuttingDown,
}

impl Refused {
    pub(super) fn status(self) -> StatusCode {
        match self {
            Self::NoRoute | Self::Mode | Self::Malformed | Self::Route(RouteError::Malformed) => {
                StatusCode::BAD_REQUEST
            }
            Self::Route(RouteError::Scope(_)) => StatusCode::UNAUTHORIZED,
            Self::Method => StatusCode::METHOD_NOT_ALLOWED,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::Denied(Denied::NoKeys)
            | Self::NotReady
            | Self::Paused
            | Self::NotWoken
            | Self::Crowded
            | Self::NoUpgrade
            | Self::ShuttingDown => StatusCode::SERVICE_UNAVAILABLE,
            Self::Denied(Denied::Malformed(_)) => StatusCode::BAD_REQUEST,
            Self::Denied(Denied::TooMany) => StatusCode::TOO_MANY_REQUESTS,
            Self::Denied(_) => StatusCode::UNAUTHORIZED,
            Self::Unreachable | Self::BadResponse => StatusCode::BAD_GATEWAY,
        }
    }

    /// Why a sandbox does not run now.
    pub(super) fn of_wake(refusal: Refusal) -> Self {
        match refusal {
            Refusal::NotFound => Self::NotFound,
            Refusal::WakeCrowded => Self::Crowded,
            _ => Self::NotWoken,
        }
    }

    /// What went wrong between the gateway and a sandbox, which WebSocket clients are told with another status.
    pub(super) fn of_exchange(refusal: Refusal, upgrade: Upgrade) -> Self {
        match (refusal, upgrade) {
            (Refusal::ShuttingDown, _) => Self::ShuttingDown,
            (Refusal::TargetMalformed, _) => Self::Malformed,
            (Refusal::Paused, _) => Self::Paused,
            (Refusal::Starting | Refusal::Unmapped | Refusal::Ended, _) => Self::NotReady,
            (_, Upgrade::Asked) => Self::NoUpgrade,
            (Refusal::Unreachable, Upgrade::No) => Self::Unreachable,
            (_, Upgrade::No) => Self::BadResponse,
        }
    }
}

/// Whether a request wants to become something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Upgrade {
    Asked,
    No,
}

impl IntoResponse for Refused {
    fn into_response(self) -> Response {
        plain(self.status(), &self)
    }
}

/// An answer in the gateway's form.
pub(super) fn plain(status: StatusCode, why: &dyn std::fmt::Display) -> Response {
    let headers =
        [(header::CONTENT_TYPE, "text/plain; charset=utf-8"), (header::X_CONTENT_TYPE_OPTIONS, "nosniff")];
    let mut response = (status, headers, format!("OpenSandbox Ingress: {why}\n")).into_response();
    if matches!(status, StatusCode::SERVICE_UNAVAILABLE | StatusCode::TOO_MANY_REQUESTS) {
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}
