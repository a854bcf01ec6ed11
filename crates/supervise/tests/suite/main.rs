//! The crate as the agent uses it: with fake processes and a paused clock, and with real ones.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod boot;
mod fake;
mod processes;
mod real;
mod services;
