//! Tests of the server library against fakes: no kernel, no root, no waiting.

#![expect(clippy::unwrap_used, reason = "a stack that cannot be built is a test that fails")]

mod edge;
mod engine;
mod events;
mod gateway;
mod listener;
mod multiplexed;
mod renewal;
mod runtime_away;
mod service;
mod snapshots;
mod telemetry;
mod tenants;
mod wake;
mod workspaces;
