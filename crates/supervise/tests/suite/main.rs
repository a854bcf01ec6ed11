//! The crate as the agent uses it: with fake processes and a paused clock, and with real ones.

mod boot;
mod fake;
mod processes;
mod real;
mod services;
