//! Routes to ports of sandboxes: how they are written, how they are signed, and who passes.
//!
//! Pure: time is given and nothing is sent. The server mints with it, the gateway verifies with it. Does not own what is known about
//! sandboxes nor the forwarding.
//!
//! Invariant: secrets and MACs are compared in constant time, and neither appears in an error or in debug output.

mod admission;
mod base36;
mod guesses;
mod keys;
mod mac;
mod route;
mod scope;
mod signature;
mod visit;

pub use admission::{Denied, Door, Moment, Presented};
pub use base36::Expiry;
pub use guesses::Guesses;
pub use keys::{Key, KeyListError, Keys};
pub use route::{LABEL_LIMIT, LabelError, PathRoute, Proof, Route, RouteError};
pub use scope::{Scope, ScopeError};
pub use signature::{Generation, Malformed, Signed, Unverified};
pub use visit::{Pass, Visit, Visited};
