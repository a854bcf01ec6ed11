//! The cap on requests in work (`server.limit_concurrency`). Beyond it the answer is 503 at once, never a queue. Health and proxied bytes do not count.

use std::sync::Arc;

use axum::{
    extract::{Request, State},
    middleware::Next,
    response::{IntoResponse, Response},
};
use tokio::sync::Semaphore;

use super::auth::is_proxied;
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
    let Some(slots) = cap.0.filter(|_| !path.starts_with("/health") && !is_proxied(path)) else {
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
