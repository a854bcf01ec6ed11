//! The Model Context Protocol, served by the command line: sandboxes as tools for language models.
//!
//! `catalog` is the list of tools, `handler` answers the protocol, and `stdio` and `http` carry it. Not owned: the API and
//! the agent, which are asked through `client` and `agent` as every other command asks them. Invariant: what a caller
//! is told is bounded, and the API key is never part of it.

mod arguments;
mod call;
mod catalog;
mod excerpt;
mod failure;
mod files;
mod handler;
pub mod http;
mod lifecycle;
mod processes;
mod readiness;
mod report;
mod results;
mod session;
mod skills;
mod snapshots;
pub mod stdio;

pub use session::{AtEnd, Session};
