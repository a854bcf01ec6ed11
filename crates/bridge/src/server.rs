//! The server's side: who may speak for a sandbox, whether it is alive, what it has said and what it is to be told.
//!
//! [`Registry`] holds all of it in memory, opens no socket, reads no clock and starts no task: calls carry the time, one heap
//! holds every deadline, and [`Registry::advance`] says what has come due. Whoever embeds it maps [`Refusal`](crate::wire::Refusal)s
//! to answers, sleeps until [`Registry::next_due`], and stores what [`Registry::saved`] gives. A heartbeat costs a hash of the
//! token, two look-ups and a few stores.

mod calls;
mod commands;
mod intake;
mod lease;
mod log_offsets;
mod registry;
mod saved;
mod scope;
mod slot;
mod timers;
mod token;

pub use calls::{Caller, FatalVerdict};
pub use commands::Settled;
pub use intake::{Admitted, Ticket};
pub use lease::{Input, LeaseState, LeaseTimes, TABLE, next_state};
pub use log_offsets::{LogBatch, LogPiece, TooManyLogs};
pub use registry::{Notice, Registration, Registry};
pub use saved::SavedSandbox;
pub use scope::{InvalidScope, RepositoryScope};
pub use slot::Standing;
pub use token::TokenHash;
