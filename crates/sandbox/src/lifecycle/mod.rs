//! The lifecycle's pure decisions: what a sandbox's state is, what may be asked of it, what happens next.
//!
//! ```text
//!   create ─► Pending ─► Running ─► Pausing ─► Paused ─► Resuming ─► Running
//!                │          │  └──────── exit ────────► Terminated (code 0) | Failed
//!                └─ error ─► Failed
//!   delete | expiry, from any state ─► Stopping ─► gone
//! ```
//!
//! A state is never stored. [`state::compute`] derives it from the open [`intent::Intent`] (what we want) and the
//! runtime's observation (what is).

pub mod intent;
pub mod request;
pub mod state;
pub mod step;
