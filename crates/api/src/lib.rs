//! The wire: one module a specification, serde types with their OpenAPI schemas, no behaviour.
//!
//! Wire types carry the upstream names. What the words mean, and which values are acceptable, is decided by the
//! crates that read them.

pub mod builds;
pub mod diagnostics;
pub mod error;
pub mod ingress;
pub mod lifecycle;
pub mod openapi;
pub mod page;
pub mod routes;
pub mod time;
pub mod webhooks;

pub use time::WireTime;
