//! The server's own facts, on SQLite: intents, idempotency keys, history.
//!
//! There is no table of sandboxes: what exists is the runtime's knowledge. SQL text is plain, with `$1` placeholders and only
//! text and integers, so that it runs on other engines unchanged. Every write that changes an intent is conditional on its generation.

mod events;
mod idempotency;
mod intents;
mod sqlite;

pub use sqlite::SqliteStore;
