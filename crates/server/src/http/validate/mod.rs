//! Rules about values that are well-formed: what this server and runtime accept.

pub mod create;
pub mod labels;
pub mod resources;
mod volumes;
mod words;
