//! Rules about values that are well-formed: what this server and runtime accept.

pub mod create;
mod environment;
pub mod labels;
mod ossfs;
mod policies;
mod policy;
pub mod repository;
pub mod resources;
pub mod rules;
mod volumes;
mod words;
