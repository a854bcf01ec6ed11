//! `/code`: contexts with a Jupyter kernel each, and running code in them.
//!
//! Owns the kernels that it starts. Bounded: [`contexts::MAX_CONTEXTS`] contexts, 16 MiB a kernel's message, 4 MiB of
//! events waiting for each client.

mod connection;
mod context;
mod contexts;
mod direct;
mod frames;
mod kernel;
mod languages;
mod message;
pub mod readiness;
mod routes;
mod run;
mod server;
mod socket;
mod spec;
pub mod zmtp;

pub use contexts::Contexts;
pub use routes::{dispatch, interrupt};
