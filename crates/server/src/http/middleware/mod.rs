//! What every request passes, outermost first: request id, CORS, the connection cap, path normalisation, the key.

pub mod auth;
pub mod concurrency;
pub mod cors;
pub mod request_id;
pub mod routing;

#[cfg(test)]
mod tests;
