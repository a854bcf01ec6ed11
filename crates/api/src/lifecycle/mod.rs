//! The lifecycle API: sandboxes, snapshots, templates, pools.
//!
//! Request types describe a body that has already been read leniently by the server; their serde form is what
//! clients of ours send. Response types leave out absent fields: `null` breaks published clients.

mod create;
mod events;
mod metrics;
mod network;
mod pool;
mod repository;
mod sandbox;
mod snapshot;
mod template;
mod volume;

pub use create::*;
pub use events::*;
pub use metrics::*;
pub use network::*;
pub use pool::*;
pub use repository::*;
pub use sandbox::*;
pub use snapshot::*;
pub use template::*;
pub use volume::*;
