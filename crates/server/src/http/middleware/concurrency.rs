//! The cap on requests in work (`server.limit_concurrency`). Beyond it the answer is 503 at once, never a queue.
//!
//! Health and proxied bytes do not count, nor do pushes: strangers send these as well, and they have a bound of their own.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::sync::Semaphore;

use super::auth::{is_proxied, is_webhook};
use crate::http::error::{ApiError, Code};

/// `None`: no cap.
#[derive(Clone, Debug)]
pub struct Cap(Option<Arc<Semaphore>>);

impl Cap {
    /// At most this many requests at once.
    pub fn new(limit: Option<usize>) -> Self {
        Self(limit.map(|n| Arc::new(Semaphore::new(n.min(Semaphore::MAX_PERMITS)))))
    }
}

/// Refuses what is over the cap.
pub async fn limit(State(cap): State<Cap>, request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let counts = !path.starts_with("/health") && !is_proxied(path) && !is_webhook(path);
    let Some(slots) = cap.0.filter(|_| counts) else {
        return next.run(request).await;
    };
    match slots.try_acquire() {
        Ok(_slot) => next.run(request).await,
        Err(_) => {
            ApiError::new(Code::Unavailable, "the server is at its limit of concurrent requests; try again")
                .with_header(http::header::RETRY_AFTER, http::HeaderValue::from_static("1"))
                .into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, body::Body, middleware::from_fn_with_state};
    use http::StatusCode;
    use tower::ServiceExt as _;

    use super::*;

    #[tokio::test]
    async fn what_has_other_bounds_needs_no_slot() {
        let full = from_fn_with_state(Cap::new(Some(0)), limit);
        let router = Router::new().fallback(|| async {}).layer(full);
        for (path, status) in [
            ("/v1/prebuilds", StatusCode::SERVICE_UNAVAILABLE),
            ("/v1/prebuilds/x/trigger", StatusCode::SERVICE_UNAVAILABLE),
            ("/v1/prebuilds/x/webhook", StatusCode::OK),
            ("/healthz", StatusCode::OK),
            ("/v1/sandboxes/x/proxy/80/", StatusCode::OK),
        ] {
            let request = Request::builder().uri(path).body(Body::empty()).unwrap();
            assert_eq!(router.clone().oneshot(request).await.unwrap().status(), status, "{path}");
        }
    }
}
