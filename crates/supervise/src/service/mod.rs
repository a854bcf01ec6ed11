//! The services that a box keeps: started, watched, restarted within a budget, stopped in reverse order.
//!
//! [`state`], [`restart`] and [`machine`] decide and touch nothing; `keeper` acts for one service; `set` is all of them.

pub mod definition;
mod instance;
mod keeper;
pub mod machine;
pub mod probe;
pub mod restart;
mod set;
pub mod snapshot;
pub mod state;

pub use definition::ServiceDefinition;
pub(crate) use set::share;
pub use set::{Health, ServiceError, Services};
pub use snapshot::ServiceSnapshot;
pub use state::State;
