//! Test harness: a runtime and a store in memory that fail on command, and a clock that follows tokio's.

mod fake_runtime;
mod manual_clock;
mod memory_store;

pub use fake_runtime::{FakeRuntime, Fault};
pub use manual_clock::ManualClock;
pub use memory_store::MemoryStore;
