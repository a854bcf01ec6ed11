//! The server's own facts, on SQLite or PostgreSQL: intents, idempotency keys, history, snapshots,
//! image builds and what they made, webhooks and what is to be sent to them.
//!
//! There is no table of sandboxes: what exists is the runtime's knowledge. Every statement is written once, with `$1`
//! placeholders and only text and integers, and runs on both engines; only the migrations and the opening differ. Every
//! write that changes an intent or a snapshot is conditional on what it replaces, so that a lost race is a value.

mod agents;
mod build_events;
mod build_store;
mod built_images;
mod database;
mod dsn;
mod event_log;
mod events;
mod idempotency;
mod image_builds;
mod intents;
pub mod migrate;
mod migrate_events;
mod migrate_rows;
mod policies;
mod pools;
mod postgres;
mod prebuilds;
mod snapshots;
mod sql_store;
mod sqlite;
mod webhooks;

pub use event_log::{LoggedEvent, OF_BUILD};
pub use sql_store::SqlStore;

#[cfg(test)]
mod tests;
