//! The box's side of the channel.
//!
//! [`Core`] decides and does nothing: it is told what happened and says what to do next. [`Bridge`] does it, over a
//! [`Transport`]; [`HttpTransport`] is the one that is used.

mod action;
mod backoff;
mod bridge;
mod core;
mod handle;
mod http;
mod lane;
mod log_outbox;
mod seen;
mod stream;
mod transport;

pub use action::{Action, Call, Ending, Identity, Notice, Pace};
pub use backoff::{Backoff, Jitter};
pub use bridge::{Bridge, Config, Delivered, VitalSigns, Vitals};
pub use core::Core;
pub use handle::{CredentialError, Handle};
pub use http::{Address, HttpTransport, InvalidAddress};
pub use lane::{Failure, Lane};
pub use transport::{Answer, Chunks, Request, Transport, TransportError};
