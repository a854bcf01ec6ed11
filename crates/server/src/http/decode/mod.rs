//! From JSON to wire types, reporting every malformed field at once.

pub mod create;
pub mod pool;
mod repository;
mod seed;
pub mod small;
