//! The embedded runtime's kernel part.
pub mod client;
pub mod create;
pub mod doctor;
pub mod host_network;
pub mod protocol;
pub mod spec;
mod teardown;

pub use create::Zygote;
pub use teardown::{TeardownError, remove_dir, shim_alive, teardown};
