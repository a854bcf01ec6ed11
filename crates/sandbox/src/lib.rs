//! What a sandbox *is*: identifiers, specification values, the lifecycle's pure decisions, and the ports
//! through which the engine reaches runtimes and the store.
//!
//! Pure by construction: no sockets, no SQL, no HTTP. Everything else in the workspace depends on this crate.

pub mod agent;
pub mod breaker;
pub mod hooks;
pub mod ids;
pub mod lifecycle;
pub mod policy;
pub mod pool;
pub mod ports;
pub mod schedule;
pub mod sealing;
pub mod snapshot;
pub mod source;
pub mod spec;
pub mod time;
pub mod workspace;

pub use ids::{ImageBuildId, ImageId, PrebuildId, SandboxId, SnapshotId, WebhookId};
pub use time::{Clock, SystemClock, Timestamp};
