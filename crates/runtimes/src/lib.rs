//! The backends behind the `Runtime` port, one module each.

mod assignment;
mod binaries;
pub mod docker;
pub mod embedded;
pub mod enforcement;
pub mod host_paths;
