//! The key in front of the API. Routes to sandbox ports are left to the ingress, which also accepts the sandboxes' own tokens.

use axum::{
    extract::{FromRequestParts, Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use http::{HeaderMap, header::AUTHORIZATION, request::Parts};

use crate::{
    http::error::{ApiError, Code},
    ingress::API_KEY,
    tenants::{Denied, KeyDigest, Keyring, Principal},
};

/// Paths that need no key. Exact: a longer path is another path.
const OPEN: &[&str] = &["/health", "/healthz", "/readyz", "/version", "/docs", "/redoc", "/openapi.json"];

impl From<Denied> for ApiError {
    fn from(denied: Denied) -> Self {
        match denied {
            Denied::Missing => Self::new(Code::MissingApiKey, "the header OPEN-SANDBOX-API-KEY is missing"),
            Denied::Unknown => Self::new(Code::InvalidApiKey, "the API key is not valid"),
            Denied::Unavailable => Self::new(
                Code::TenantProviderUnavailable,
                "the API key cannot be checked at the moment; try again",
            ),
        }
    }
}

/// Who calls, for handlers. On a route that was let through without a key there is nobody, and asking is our mistake: it
/// must not pass for the operator.
impl<S: Sync> FromRequestParts<S> for Principal {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, ApiError> {
        parts.extensions.get().cloned().ok_or_else(ApiError::internal)
    }
}

/// A caller to whom the whole server belongs. Tenants are refused.
#[derive(Clone, Copy, Debug)]
pub struct Operator;

impl<S: Sync> FromRequestParts<S> for Operator {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, ApiError> {
        match Principal::from_request_parts(parts, state).await?.tenant() {
            None => Ok(Self),
            Some(_) => Err(ApiError::new(Code::NotForTenants, "this belongs to the server, not to a tenant")),
        }
    }
}

/// Whether the path leads to a port of a sandbox.
pub(super) fn is_proxied(path: &str) -> bool {
    let path = path.strip_prefix("/v1").unwrap_or(path);
    let mut segments = path.split('/');
    segments.next() == Some("")
        && segments.next() == Some("sandboxes")
        && segments.next().is_some_and(|id| !id.is_empty())
        && segments.next() == Some("proxy")
        && segments.next().is_some_and(|port| !port.is_empty())
}

/// Whether the path is where a code host tells of pushes. These are signed with a secret of their own.
pub(super) fn is_webhook(path: &str) -> bool {
    let id = path.strip_prefix("/v1/prebuilds/").and_then(|rest| rest.strip_suffix("/webhook"));
    id.is_some_and(|id| !id.is_empty() && !id.contains('/'))
}

/// What opens the API.
#[derive(Clone, Debug)]
pub struct Door {
    pub keys: Keyring,
    /// `server.open_metrics`: `/metrics` needs no key.
    pub open_metrics: bool,
    /// Opens the routes for gateways beside the keys, and nothing else.
    pub ingress_key: Option<KeyDigest>,
}

/// A key that may be configured; blank is none.
pub fn digest(key: &str) -> Option<KeyDigest> {
    (!key.trim().is_empty()).then(|| KeyDigest::of(key.as_bytes()))
}

/// The key of a request: in the header of its own, or as a bearer token.
pub fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = || {
        let text = headers.get(AUTHORIZATION)?.as_bytes();
        let (scheme, key) = text.split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    };
    headers.get(API_KEY).map(|value| value.as_bytes()).or_else(bearer)
}

/// Refuses requests without a key, and tells handlers whose key it is.
pub async fn require_key(State(door): State<Door>, mut request: Request, next: Next) -> Response {
    let Door { keys, open_metrics, ingress_key } = door;
    let path = request.uri().path();
    let open = OPEN.contains(&path) || (open_metrics && path == "/metrics");
    if !open && !is_proxied(path) && !is_webhook(path) {
        let given = given_key(request.headers());
        let of_gateway = path.starts_with("/v1/ingress/")
            && ingress_key.is_some_and(|key| given.is_some_and(|given| key == KeyDigest::of(given)));
        match if of_gateway { Ok(Principal::operator()) } else { keys.admit(given).await } {
            Ok(principal) => request.extensions_mut().insert(principal),
            Err(denied) => return ApiError::from(denied).into_response(),
        };
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ports_of_sandboxes_are_left_to_the_ingress() {
        for yes in ["/sandboxes/a/proxy/80", "/v1/sandboxes/a/proxy/80/x/y", "/v1/sandboxes/a/proxy/80/"] {
            assert!(is_proxied(yes), "{yes}");
        }
        for no in [
            "/sandboxes",
            "/v1/sandboxes/a/proxy",
            "/v1/sandboxes/a/proxy/",
            "/sandboxes//proxy/80",
            "/x/sandboxes/a/proxy/1",
        ] {
            assert!(!is_proxied(no), "{no}");
        }
    }
}
