//! The server's own facts, on SQLite or PostgreSQL: intents, idempotency keys, history, snapshots.
//!
//! There is no table of sandboxes: what exists is the runtime's knowledge. Every statement is written once, with `$1`
//! placeholders and only text and integers, and runs on both engines; only the migrations and the opening differ. Every
//! write that changes an intent or a snapshot is conditional on what it replaces, so that a lost race is a value.

mod agents;
mod database;
mod dsn;
mod events;
mod idempotency;
mod intents;
pub mod migrate;
mod postgres;
mod snapshots;
mod sql_store;
mod sqlite;

pub use sql_store::SqlStore;

#[cfg(test)]
mod tests;
