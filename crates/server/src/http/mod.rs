//! The HTTP edge: reads requests, calls the engine, writes answers. No SQL, no runtime, no decisions about sandboxes.

mod app;
pub mod decode;
mod diagnostics;
mod docs;
mod engine_errors;
pub mod error;
mod events;
pub mod fields;
pub mod filters;
mod health;
pub mod images;
mod ingress;
mod instant;
pub mod malformed;
mod metrics_events;
mod metrics_page;
pub mod middleware;
mod network_policy;
pub mod parse;
mod present;
mod present_workspace;
pub mod router;
mod sandboxes;
mod services;
mod snapshots;
mod unsupported;
pub mod validate;

pub use app::App;
