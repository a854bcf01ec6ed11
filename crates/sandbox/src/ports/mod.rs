//! The traits behind which the outside world sits.

pub mod captures;
pub mod dockerfiles;
pub mod runtime;
pub mod store;

pub use captures::Captures;
pub use dockerfiles::Dockerfiles;
pub use runtime::{Runtime, RuntimeError, RuntimeErrorKind};
pub use store::{Store, StoreError};
