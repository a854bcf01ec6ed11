//! What every request passes, outermost first: request id (with logs, metrics and traces), CORS, the cap on concurrent requests, the key, path
//! normalisation.

pub mod auth;
pub mod concurrency;
pub mod cors;
pub mod request_id;
pub mod routing;
pub mod usage;

#[cfg(test)]
mod tests;
