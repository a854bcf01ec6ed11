//! Forwards HTTP/1.1 between two connections, upgrades included.
//!
//! Owns connections to backends, the header rules every hop must follow and the clean end of both. Knows nothing about
//! sandboxes, credentials or routes: callers say where a request goes and which headers change.
//!
//! Invariants: bytes are passed on as they arrive (nothing is collected, decoded or delayed); a body that was cut short
//! is never presented as complete; nothing a client names in `Connection` can remove a header that the caller set.

mod alarm;
mod body;
mod chunked;
mod drain;
mod error;
mod exchange;
mod forward;
mod head;
mod headers;
mod limits;
mod pool;
mod pulse;
mod room;
mod tunnel;
mod upgrade;
mod wire;

pub use body::ResponseBody;
pub use chunked::InvalidChunk;
pub use drain::Counts;
pub use error::{BodyError, ConnectError, ForwardError, InvalidHead};
pub use forward::{Forwarder, Lease};
pub use headers::HeaderEdits;
pub use limits::Limits;
pub use pulse::Pulse;
pub use tunnel::{Duplex, Reclaim, Reclaimed, Socket};
pub use upgrade::requested as requested_upgrade;

/// Errors of bodies that come from elsewhere.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;
