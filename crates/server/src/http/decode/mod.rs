//! From JSON to wire types, reporting every malformed field at once.

pub mod create;
mod repository;
mod seed;
pub mod small;
