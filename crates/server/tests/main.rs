//! Tests of the server library against fakes: no kernel, no root, no waiting.

#![expect(clippy::unwrap_used, reason = "a stack that cannot be built is a test that fails")]

mod builds;
mod confidential;
mod edge;
mod engine;
mod events;
mod gateway;
mod listener;
mod multiplexed;
mod policies;
mod pools;
mod pull;
mod renewal;
mod repository_pools;
mod runtime_away;
mod service;
mod service_access;
mod snapshots;
mod telemetry;
mod tenants;
mod wake;
mod webhooks;
mod workspaces;
