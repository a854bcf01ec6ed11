//! The agent inside every box: PID 1 and the execd-compatible HTTP API, one static binary.
//!
//! It owns the processes, files and output of its box. It knows nothing of other boxes, of images or of how
//! the box was made: all of that arrives once, in the boot configuration.
//! Invariant: no request, however malformed, may end the process, because PID 1 takes the box with it.

pub mod accounts;
pub mod activity;
pub mod binding;
pub mod bootstrap;
mod cgroup;
pub mod code;
pub mod command;
pub mod envs;
pub mod events;
pub mod files;
pub mod hardening;
pub mod hooks;
pub mod http;
pub mod init;
pub mod isolated;
pub mod journal;
pub mod kernel;
pub mod lines;
pub mod metrics;
pub mod port_proxy;
pub mod pty;
mod resolver;
pub mod sealing;
pub mod session;
pub mod settings;
pub mod standby;
pub mod telemetry;
pub mod trust;
pub mod workspace;
