//! Errors as clients see them: the only file that pairs a domain error with a status.
//!
//! Owns the catalogue of codes and the body shapes. Message texts are free (no client matches on them) but must never
//! repeat what the caller sent beyond field names, nor carry the source of a 5xx.

use std::fmt;

use axum::{
    Json,
    response::{IntoResponse, Response},
};
use http::{HeaderName, HeaderValue, StatusCode, header};
use sandglass_api::error::{ErrorBody, FieldError, RouterErrorBody, ValidationBody};

/// Result of everything at the HTTP edge.
pub type ApiResult<T> = Result<T, ApiError>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $status:ident $code:literal;)*) => {
        /// A status together with the code that goes with it. One variant a pair: the same code may mean
        /// different statuses in different places.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Code {
            $($(#[$doc])* $name,)*
        }

        impl Code {
            /// Every pair there is.
            pub const ALL: &'static [Code] = &[$(Code::$name,)*];

            /// The HTTP status.
            pub fn status(self) -> StatusCode {
                match self {
                    $(Code::$name => StatusCode::$status,)*
                }
            }

            /// The text in the body.
            pub fn text(self) -> &'static str {
                match self {
                    $(Code::$name => $code,)*
                }
            }
        }
    };
}

codes! {
    MissingApiKey = UNAUTHORIZED "MISSING_API_KEY";
    InvalidApiKey = UNAUTHORIZED "INVALID_API_KEY";
    TenantProviderUnavailable = SERVICE_UNAVAILABLE "TENANT_PROVIDER_UNAVAILABLE";
    /// Ours: a route about the server itself, asked for by a tenant.
    NotForTenants = FORBIDDEN "GENERAL::FORBIDDEN";
    MissingOrInvalidSecureAccess = UNAUTHORIZED "MISSING_OR_INVALID_SECURE_ACCESS";
    InvalidMetadataFormat = BAD_REQUEST "INVALID_METADATA_FORMAT";
    /// A reserved key in a metadata patch; without a prefix, unlike on create.
    ReservedMetadataLabel = BAD_REQUEST "INVALID_METADATA_LABEL";
    InvalidMetadataLabel = BAD_REQUEST "SANDBOX::INVALID_METADATA_LABEL";
    InvalidParameter = BAD_REQUEST "SANDBOX::INVALID_PARAMETER";
    ApiNotSupported = BAD_REQUEST "SANDBOX::API_NOT_SUPPORTED";
    /// A route that this runtime cannot serve at all.
    NotAvailable = NOT_IMPLEMENTED "SANDBOX::API_NOT_SUPPORTED";
    UnsupportedPoolRef = BAD_REQUEST "SANDBOX::UNSUPPORTED_POOL_REF";
    SandboxInternal = INTERNAL_SERVER_ERROR "SANDBOX::INTERNAL_ERROR";
    DiagnosticsScope = BAD_REQUEST "DIAGNOSTICS_SCOPE_UNSUPPORTED";
    ListUnavailable = SERVICE_UNAVAILABLE "SANDBOX_LIST_UNAVAILABLE";

    SandboxNotFound = NOT_FOUND "DOCKER::SANDBOX_NOT_FOUND";
    /// The one code that clients poll on.
    AddressNotYetKnown = NOT_FOUND "KUBERNETES::POD_IP_NOT_AVAILABLE";
    QueryFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_QUERY_FAILED";
    /// The runtime cannot be reached, so nobody knows.
    QueryUnavailable = SERVICE_UNAVAILABLE "DOCKER::SANDBOX_QUERY_FAILED";
    ImagePullFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_IMAGE_PULL_FAILED";
    StartFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_START_FAILED";
    /// The runtime cannot be reached, so nothing was begun.
    StartUnavailable = SERVICE_UNAVAILABLE "DOCKER::SANDBOX_START_FAILED";
    DeleteFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_DELETE_FAILED";
    NotRunning = CONFLICT "DOCKER::SANDBOX_NOT_RUNNING";
    PauseFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_PAUSE_FAILED";
    NotPaused = CONFLICT "DOCKER::SANDBOX_NOT_PAUSED";
    ResumeFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_RESUME_FAILED";
    /// The new expiry is not in the future.
    InvalidExpiration = BAD_REQUEST "DOCKER::INVALID_EXPIRATION";
    /// The sandbox has no expiry to move.
    NoExpiration = CONFLICT "DOCKER::INVALID_EXPIRATION";
    ExecdStartFailed = SERVICE_UNAVAILABLE "DOCKER::SANDBOX_EXECD_START_FAILED";
    ExecdDistributionFailed = INTERNAL_SERVER_ERROR "DOCKER::SANDBOX_EXECD_DISTRIBUTION_FAILED";
    InvalidEntrypoint = BAD_REQUEST "DOCKER::INVALID_ENTRYPOINT";
    InvalidPort = BAD_REQUEST "DOCKER::INVALID_PORT";
    EndpointUnavailable = INTERNAL_SERVER_ERROR "DOCKER::NETWORK_MODE_ENDPOINT_UNAVAILABLE";
    /// No room for another sandbox.
    Exhausted = TOO_MANY_REQUESTS "SANDBOX::RESOURCES_EXHAUSTED";

    SnapshotNotFound = NOT_FOUND "SNAPSHOT::NOT_FOUND";
    SnapshotInvalidSourceState = CONFLICT "SNAPSHOT::INVALID_SOURCE_STATE";
    SnapshotNotImplemented = NOT_IMPLEMENTED "SNAPSHOT::NOT_IMPLEMENTED";
    SnapshotInvalidState = CONFLICT "SNAPSHOT::INVALID_STATE";
    SnapshotDeleteConflict = CONFLICT "SNAPSHOT::DELETE_CONFLICT";
    SnapshotNotReady = CONFLICT "SNAPSHOT::NOT_READY";
    SnapshotInvalidRestoreConfig = CONFLICT "SNAPSHOT::INVALID_RESTORE_CONFIG";
    SnapshotRemoveFailed = INTERNAL_SERVER_ERROR "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED";
    /// The runtime cannot be reached; the removal goes on when it can.
    SnapshotRemoveUnavailable = SERVICE_UNAVAILABLE "DOCKER::SNAPSHOT_IMAGE_REMOVE_FAILED";

    PoolNotSupported = NOT_IMPLEMENTED "KUBERNETES::POOL_NOT_SUPPORTED";
    PoolNotFound = NOT_FOUND "KUBERNETES::POOL_NOT_FOUND";
    PoolAlreadyExists = CONFLICT "KUBERNETES::POOL_ALREADY_EXISTS";
    TemplatesNotSupported = NOT_IMPLEMENTED "FSB::API_NOT_SUPPORTED";

    VolumeDuplicateName = BAD_REQUEST "VOLUME::DUPLICATE_NAME";
    VolumeInvalidMountPath = BAD_REQUEST "VOLUME::INVALID_MOUNT_PATH";
    VolumeInvalidSubPath = BAD_REQUEST "VOLUME::INVALID_SUB_PATH";
    VolumeInvalidHostPath = BAD_REQUEST "VOLUME::INVALID_HOST_PATH";
    VolumeHostPathNotAllowed = BAD_REQUEST "VOLUME::HOST_PATH_NOT_ALLOWED";
    VolumeHostPathCreateFailed = INTERNAL_SERVER_ERROR "VOLUME::HOST_PATH_CREATE_FAILED";
    VolumeUnsupportedBackend = BAD_REQUEST "VOLUME::UNSUPPORTED_BACKEND";
    VolumeNotFound = BAD_REQUEST "VOLUME::PVC_NOT_FOUND";
    VolumeInspectFailed = INTERNAL_SERVER_ERROR "VOLUME::PVC_INSPECT_FAILED";
    VolumeSubPathUnsupported = BAD_REQUEST "VOLUME::PVC_SUBPATH_UNSUPPORTED_DRIVER";
    VolumeOssfsOption = BAD_REQUEST "VOLUME::INVALID_OSSFS_OPTION";
    VolumeOssfsCredentials = BAD_REQUEST "VOLUME::INVALID_OSSFS_CREDENTIALS";
    VolumeOssfsMountRoot = INTERNAL_SERVER_ERROR "VOLUME::INVALID_OSSFS_MOUNT_ROOT";
    VolumeOssfsMountFailed = INTERNAL_SERVER_ERROR "VOLUME::OSSFS_MOUNT_FAILED";

    BackendConnectionFailed = BAD_GATEWAY "BACKEND_CONNECTION_FAILED";
    BackendResponseFailed = BAD_GATEWAY "BACKEND_RESPONSE_FAILED";
    BackendTimeout = GATEWAY_TIMEOUT "BACKEND_TIMEOUT";

    BadRequest = BAD_REQUEST "GENERAL::UNKNOWN_ERROR";
    /// The catalogue's word for a 404 without a better one.
    UnknownNotFound = NOT_FOUND "GENERAL::UNKNOWN_ERROR";
    Internal = INTERNAL_SERVER_ERROR "GENERAL::UNKNOWN_ERROR";
    Unavailable = SERVICE_UNAVAILABLE "GENERAL::UNAVAILABLE";
    BodyTooLarge = PAYLOAD_TOO_LARGE "GENERAL::BODY_TOO_LARGE";
    /// Not even HTTP, or HTTP with two meanings; the status says more.
    BadForm = BAD_REQUEST "GENERAL::MALFORMED_REQUEST";
    BodyTooSlow = REQUEST_TIMEOUT "GENERAL::REQUEST_TIMEOUT";
    IdempotencyKeyReused = CONFLICT "GENERAL::IDEMPOTENCY_KEY_REUSED";
    /// The sandbox that the key stands for is gone.
    IdempotencyKeySpent = CONFLICT "GENERAL::IDEMPOTENCY_KEY_SPENT";
    RepositoryInvalidUrl = BAD_REQUEST "REPOSITORY::INVALID_URL";
    RepositoryInvalidRef = BAD_REQUEST "REPOSITORY::INVALID_REF";
    RepositoryInvalidPath = BAD_REQUEST "REPOSITORY::INVALID_PATH";
    RepositoryHostNotAllowed = BAD_REQUEST "REPOSITORY::HOST_NOT_ALLOWED";
    ServicePortConflict = BAD_REQUEST "SERVICE::PORT_CONFLICT";
    ServiceNotFound = NOT_FOUND "SERVICE::NOT_FOUND";
    UnsupportedPolicy = BAD_REQUEST "SANDBOX::UNSUPPORTED_POLICY";
    InvalidState = CONFLICT "SANDBOX::INVALID_STATE";
    /// Nothing fits, and the request forbids to build.
    ImageNotCached = PRECONDITION_FAILED "IMAGE::NOT_CACHED";
    ImageNotFound = NOT_FOUND "IMAGE::NOT_FOUND";
    ImageInUse = CONFLICT "IMAGE::IN_USE";
    /// The image cannot be given to anybody any more.
    ImageUnusable = CONFLICT "IMAGE::UNUSABLE";
    ImageBuildNotFound = NOT_FOUND "IMAGE_BUILD::NOT_FOUND";
    ImageBuildTerminal = CONFLICT "IMAGE_BUILD::TERMINAL";
    /// The same build just failed and would fail again.
    ImageBuildFailedRecently = CONFLICT "IMAGE_BUILD::FAILED_RECENTLY";
    ImageBuildUnavailable = SERVICE_UNAVAILABLE "IMAGE_BUILD::UNAVAILABLE";
    PrebuildNotFound = NOT_FOUND "PREBUILD::NOT_FOUND";
    WebhookUnsigned = UNAUTHORIZED "PREBUILD::UNSIGNED";
    WebhookNotFound = NOT_FOUND "WEBHOOK::NOT_FOUND";
    WebhookConflict = CONFLICT "WEBHOOK::CONFLICT";
    /// Sandboxes of this kind did not become ready of late.
    CircuitOpen = TOO_MANY_REQUESTS "SPAWN::CIRCUIT_OPEN";
    QuotaExceeded = TOO_MANY_REQUESTS "QUOTA::EXCEEDED";
    RepositoryInvalidRecipe = BAD_REQUEST "REPOSITORY::INVALID_RECIPE";
    RepositoryRefNotFound = NOT_FOUND "REPOSITORY::REF_NOT_FOUND";
    /// The remote refused the credential, which is not that of this API.
    RepositoryAuthFailed = BAD_GATEWAY "REPOSITORY::AUTH_FAILED";
    RepositoryUnreachable = BAD_GATEWAY "REPOSITORY::UNREACHABLE";
    NoSpace = INSUFFICIENT_STORAGE "GENERAL::NO_SPACE";
    RouteNotFound = NOT_FOUND "GENERAL::NOT_FOUND";
    MethodNotAllowed = METHOD_NOT_ALLOWED "GENERAL::METHOD_NOT_ALLOWED";
    Malformed = UNPROCESSABLE_ENTITY "GENERAL::VALIDATION_ERROR";
}

/// What stands beside `code` and `message` in the body.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Detail {
    Absent,
    Fields(Vec<FieldError>),
    /// The router's own word, for clients that look at `detail`.
    Router(&'static str),
}

/// An answer that is an error: `{code, message}`, for malformed requests also `detail`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    pub status: StatusCode,
    pub code: &'static str,
    pub message: String,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    detail: Detail,
}

impl ApiError {
    /// An application error.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self {
            status: code.status(),
            code: code.text(),
            message: message.into(),
            headers: Vec::new(),
            detail: Detail::Absent,
        }
    }

    /// 400 `SANDBOX::INVALID_PARAMETER`.
    pub fn invalid_parameter(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidParameter, message)
    }

    /// 404 for a sandbox that does not exist or never did. The id is not repeated: it is in the request's path.
    pub fn sandbox_not_found() -> Self {
        Self::new(Code::SandboxNotFound, "sandbox not found")
    }

    /// 500 that says nothing about its cause; the cause belongs into the log.
    pub fn internal() -> Self {
        Self::new(Code::Internal, "internal server error")
    }

    /// 422 with every offending field.
    pub fn malformed(fields: Vec<FieldError>) -> Self {
        let message = match fields.first() {
            Some(first) if fields.len() == 1 => format!("the request is malformed: {}", first.msg),
            Some(first) => format!("the request is malformed: {} (and {} more)", first.msg, fields.len() - 1),
            None => "the request is malformed".to_owned(),
        };
        Self { detail: Detail::Fields(fields), ..Self::new(Code::Malformed, message) }
    }

    /// 404 of the router.
    pub fn no_such_route() -> Self {
        Self { detail: Detail::Router("Not Found"), ..Self::new(Code::RouteNotFound, "no such route") }
    }

    /// 405 of the router; `allow` as it goes into the header.
    pub fn method_not_allowed(allow: &str) -> Self {
        let error = Self {
            detail: Detail::Router("Method Not Allowed"),
            ..Self::new(Code::MethodNotAllowed, "method not allowed")
        };
        match HeaderValue::from_str(allow) {
            Ok(value) if !allow.is_empty() => error.with_header(header::ALLOW, value),
            _ => error,
        }
    }

    /// 429 with the number of seconds after which another attempt makes sense.
    pub fn exhausted(message: impl Into<String>, retry_after_seconds: u32) -> Self {
        Self::new(Code::Exhausted, message)
            .with_header(header::RETRY_AFTER, HeaderValue::from(retry_after_seconds))
    }

    /// Adds a header.
    #[must_use]
    pub fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.push((name, value));
        self
    }

    /// The offending fields of a 422, none for other errors.
    pub fn fields(&self) -> &[FieldError] {
        match &self.detail {
            Detail::Fields(fields) => fields,
            _ => &[],
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for ApiError {}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let code = self.code.to_owned();
        let message = self.message;
        let mut response = match self.detail {
            Detail::Absent => (self.status, Json(ErrorBody { code, message })).into_response(),
            Detail::Fields(detail) => {
                (self.status, Json(ValidationBody { code, message, detail })).into_response()
            }
            Detail::Router(detail) => {
                (self.status, Json(RouterErrorBody { code, message, detail: detail.to_owned() }))
                    .into_response()
            }
        };
        for (name, value) in self.headers {
            response.headers_mut().append(name, value);
        }
        response
    }
}

#[cfg(test)]
mod tests {
    use axum::body::to_bytes;
    use sandglass_api::error::{Loc, VALIDATION_ERROR};
    use serde_json::{Value, json};

    use super::*;

    async fn body(error: ApiError) -> Value {
        let response = error.into_response();
        assert_eq!(response.headers()[header::CONTENT_TYPE], "application/json");
        serde_json::from_slice(&to_bytes(response.into_body(), 1 << 20).await.unwrap()).unwrap()
    }

    #[tokio::test]
    async fn an_application_error_has_exactly_two_keys() {
        let error = ApiError::sandbox_not_found();
        assert_eq!(error.status, StatusCode::NOT_FOUND);
        assert_eq!(
            body(error).await,
            json!({"code": "DOCKER::SANDBOX_NOT_FOUND", "message": "sandbox not found"})
        );
    }

    #[tokio::test]
    async fn router_errors_carry_both_shapes() {
        let error = ApiError::method_not_allowed("GET, PUT");
        assert_eq!(error.clone().into_response().headers()[header::ALLOW], "GET, PUT");
        assert_eq!(
            body(error).await,
            json!({"code": "GENERAL::METHOD_NOT_ALLOWED", "message": "method not allowed", "detail": "Method Not Allowed"})
        );
    }

    #[tokio::test]
    async fn a_malformed_request_lists_its_fields_without_their_values() {
        let error = ApiError::malformed(vec![FieldError {
            kind: "missing".to_owned(),
            loc: vec![Loc::from("body"), Loc::from("volumes"), Loc::from(0)],
            msg: "Field required".to_owned(),
        }]);
        assert_eq!(
            body(error).await,
            json!({"code": VALIDATION_ERROR, "message": "the request is malformed: Field required",
                "detail": [{"type": "missing", "loc": ["body", "volumes", 0], "msg": "Field required"}]})
        );
    }

    #[test]
    fn the_validation_code_is_the_wire_crates() {
        assert_eq!(Code::Malformed.text(), VALIDATION_ERROR);
    }

    #[test]
    fn statuses_are_errors_and_codes_are_words() {
        for code in Code::ALL {
            assert!(code.status().is_client_error() || code.status().is_server_error());
            assert!(code.text().chars().all(|c| c.is_ascii_uppercase() || "_:".contains(c)), "{code:?}");
        }
    }
}
