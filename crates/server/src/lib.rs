//! The control plane: configuration, HTTP edge, engine, store, ingress.
//!
//! A library, so that the one `sandglass` binary (and tests) can start a server from a bound listener and a configuration value.

pub mod agents;
pub mod builds;
pub mod config;
pub mod diagnostics;
pub mod engine;
pub mod gateway;
pub mod http;
pub mod ingress;
pub mod listener;
pub mod renewal;
pub mod runtimes;
pub mod server;
pub mod store;
pub mod telemetry;
pub mod tenants;
mod tls;
pub mod webhooks;
pub mod workspace;
