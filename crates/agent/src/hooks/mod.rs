//! Lifecycle hooks: a command before the entrypoint, and commands on a schedule.
//!
//! What hooks are, and which are refused, is in `sandglass_sandbox::hooks`; here they run.
//! Invariant: a hook runs at most once at a time, and of its output only the end is kept ([`run::MAX_TAIL`] bytes).

pub mod periodic;
pub mod run;
pub mod source;
mod timetable;
