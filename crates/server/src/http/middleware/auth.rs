//! The key in front of the API. Routes to sandbox ports are left to the ingress, which also accepts the sandboxes' own tokens.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

use crate::{
    http::error::{ApiError, Code},
    ingress::API_KEY,
};

/// Paths that need no key. Exact: a longer path is another path.
const OPEN: &[&str] = &["/health", "/healthz", "/readyz", "/version", "/docs", "/redoc", "/openapi.json"];

/// The configured key, hashed so that comparing takes the same time for every guess of every length.
#[derive(Clone)]
pub struct Key(Option<Arc<[u8; 32]>>);

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key(***)")
    }
}

impl Key {
    /// `None` or blank: authentication is off; whether that may be is decided before the server starts.
    pub fn new(key: Option<&str>) -> Self {
        Self(
            key.filter(|key| !key.trim().is_empty())
                .map(|key| Arc::new(Sha256::digest(key.as_bytes()).into())),
        )
    }

    /// Whether a request with this header value may pass.
    ///
    /// # Errors
    /// 401 with the documented codes.
    pub fn admit(&self, given: Option<&[u8]>) -> Result<(), ApiError> {
        let Some(key) = &self.0 else { return Ok(()) };
        let Some(given) = given else {
            return Err(ApiError::new(Code::MissingApiKey, "the header OPEN-SANDBOX-API-KEY is missing"));
        };
        let given: [u8; 32] = Sha256::digest(given).into();
        if bool::from(given.ct_eq(key.as_ref())) {
            Ok(())
        } else {
            Err(ApiError::new(Code::InvalidApiKey, "the API key is not valid"))
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

/// Refuses requests without the key.
pub async fn require_key(State(key): State<Key>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    if !OPEN.contains(&path) && !is_proxied(path) {
        let given = request.headers().get(API_KEY).map(|value| value.as_bytes());
        if let Err(refusal) = key.admit(given) {
            return refusal.into_response();
        }
    }
    next.run(request).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_key_passes() {
        let key = Key::new(Some("secret"));
        assert_eq!(key.admit(None).unwrap_err().code, "MISSING_API_KEY");
        for wrong in ["", "secre", "secret ", "Secret", "secretsecret"] {
            assert_eq!(key.admit(Some(wrong.as_bytes())).unwrap_err().code, "INVALID_API_KEY", "{wrong}");
        }
        assert!(key.admit(Some(b"secret")).is_ok());
        assert!(Key::new(None).admit(None).is_ok());
        assert!(Key::new(Some(" ")).admit(None).is_ok());
    }

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
