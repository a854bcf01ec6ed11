//! The traits behind which the outside world sits.

pub mod engine;
pub mod log;
pub mod resolver;
pub mod store;

pub use engine::{Artifact, Engine, EngineError, Job, UserFailure};
pub use log::{Filter, Filters, LogError, LogSink, Logs};
pub use resolver::{MemoryVault, Observer, ResolveError, ResolveErrorKind, Resolver, Silent, Vault};
pub use store::{
    Advance, BuildFilter, BuildStore, Commit, ImageFilter, Inserted, Negative, NegativeChange, NewImage,
    StoreError,
};
