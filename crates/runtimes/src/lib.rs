//! The backends behind the `Runtime` port, one module each.

mod audit;
mod binaries;
pub mod docker;
pub mod embedded;
pub mod host_paths;
