//! What every request passes, outermost first: request id, CORS, the cap on concurrent requests, the key, path normalisation.

pub mod auth;
pub mod concurrency;
pub mod cors;
pub mod request_id;
pub mod routing;

#[cfg(test)]
mod tests;
