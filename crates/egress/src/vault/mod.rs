//! The credential vault: secrets of the sandbox's owner and the requests that they are lent to.
//!
//! Owns the model, its validation and the API's answers. Does not put anything into a request: that is the interceptor's, which reads what is
//! in force through [`Lent`].
//!
//! Invariant: no value of a credential and no reference to one leaves this module other than through [`Active`] and [`Vault::export`].

mod active;
mod api;
mod binding;
mod mutation;
mod overlap;
mod path;
mod redaction;
mod request;
mod secret;
mod state;
mod substitution;
mod texts;

pub use active::{Active, Injection, Lent, Loan, Selection, Target, Unreadable};
pub use api::{Answer, Call, MAX_BODY, Transport, handle};
pub use binding::{Scheme, Surface};
pub use redaction::Redactor;
pub use secret::Secret;
pub use state::{Conditions, Refusal, Scope, Unrestorable, Vault};
pub use substitution::{BodyKind, Overlong};
