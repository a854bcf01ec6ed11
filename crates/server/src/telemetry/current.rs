//! The request that a task works for, as far as logs know it: its id.
//!
//! Travels with the task, not with the thread, and is read only when something is logged: most requests log nothing, and a span of the
//! logging library for each of them would cost more than answering them.

use std::future::Future;

use futures_util::future::Either;
use http::HeaderValue;

tokio::task_local! {
    static REQUEST: HeaderValue;
}

/// Runs the future for the request with this id.
pub fn within<F: Future>(id: HeaderValue, future: F) -> impl Future<Output = F::Output> {
    REQUEST.scope(id, future)
}

/// Does something for the request with this id.
pub fn within_sync<T>(id: HeaderValue, work: impl FnOnce() -> T) -> T {
    REQUEST.sync_scope(id, work)
}

/// The future for a task that is about to be spawned, for the request that is current now.
pub fn inherit<F: Future>(future: F) -> impl Future<Output = F::Output> {
    match REQUEST.try_with(HeaderValue::clone) {
        Ok(id) => Either::Left(REQUEST.scope(id, future)),
        Err(_) => Either::Right(future),
    }
}

/// The id of the current request; `None` outside of one.
pub fn request_id() -> Option<String> {
    REQUEST.try_with(|id| id.to_str().map(str::to_owned)).ok()?.ok()
}
