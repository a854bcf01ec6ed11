//! The backends behind the `Runtime` port, one module each.

pub mod docker;
pub mod embedded;
