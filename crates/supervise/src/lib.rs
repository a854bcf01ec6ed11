//! What the agent does inside a box between its own start and *Ready*, and afterwards with the services it keeps.
//!
//! ```text
//!   BootPlan ─► boot::Boot ──► sync ─► setup ─► services ─► start ─► entrypoint ─► Ready
//!                  │                               │
//!                  │ hooks                         ▼
//!                  │                        service::Services (one task a service, until stop_all)
//!                  ▼                               ▼
//!               process::Child ── stdout, stderr ─► Filter ─► Logs (segments on disk), Tail (end of the output)
//! ```
//!
//! Decisions are pure: [`service::state`] (the transition table), [`service::restart`] (back-off and budget),
//! [`service::machine`] (what a service does next), [`boot::deadline`] (when a phase has been silent for too long). The
//! drivers around them wait, start and signal through the [`ports`], and tell what happened as [`report::Report`]s.
//!
//! Not here: waiting for processes (the reaper of the agent does, behind [`ports::Spawn`]), git ([`ports::Repositories`]), the
//! channel to the server, and HTTP.

pub mod boot;
pub mod capture;
pub mod clock;
pub mod code_server;
pub mod filter;
pub mod log;
pub mod plan;
pub mod ports;
pub mod process;
pub mod report;
pub mod service;
pub mod tail;

pub use boot::{Boot, Outcome};
pub use clock::{Clock, Moment, SystemClock};
pub use log::Logs;
pub use plan::BootPlan;
pub use ports::Ports;
pub use service::Services;
