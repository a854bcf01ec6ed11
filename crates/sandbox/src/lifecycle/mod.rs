//! The lifecycle's pure decisions: what a sandbox's state is, what may be asked of it, what happens next.
//!
//! ```text
//!   create ─► Pending ─► Running ─► Pausing ─► Paused ─► Resuming ─► Running
//!                │          │  └──────── exit ────────► Terminated (code 0) | Failed
//!                └─ error ─► Failed
//!   delete | expiry, from any state ─► Stopping ─► gone
//! ```
//!
//! A state is never stored. [`state::compute`] derives it from the open [`intent::Intent`] (what we want), the runtime's observation
//! (what is) and, of a box made from a repository, what its agent told ([`boot::AgentFacts`]). Such a create passes through
//!
//! ```text
//!   accepted ─► image_resolving ─► image_build_queued ─► image_building ─► image_pulling ─► container_creating
//!            ─► agent_connecting ─► booting ─► (closed) ready ◄─► degraded, unresponsive
//! ```
//!
//! all of them `Pending` until it is ready, and its intent stays open until then.

pub mod boot;
pub mod intent;
pub mod request;
pub mod state;
pub mod step;
