//! The output of services and boot steps, kept in the box: bounded, addressed by offset, on disk.
//!
//! An offset counts every byte a source ever wrote, both streams together; what is no longer kept leaves a gap that readers can see.
//! What is kept outlives the process that wrote it, and the agent.
//!
//! Invariant: a frame's bytes are those that were written at its offset. What cannot be kept (a full disk) moves the offset on.

mod segment;
mod source;
mod store;

pub use store::{Batch, Extent, Frame, Limits, LogError, LogWriter, Logs};
