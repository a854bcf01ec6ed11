//! The forwarder between real sockets on loopback.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a failed test")]

mod exchange;
mod failures;
mod harness;
mod headers;
mod streaming;
mod upgrades;
