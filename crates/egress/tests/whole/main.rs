//! The whole program in network namespaces of its own, in both placements: a sandbox on one side, a small world of resolvers and servers on
//! the other, and what gets from one to the other. Needs root and the `ip` tool; nothing leaves the namespaces.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod client;
mod measure;
mod policy;
mod program;
mod restarts;
mod stage;
mod world;
