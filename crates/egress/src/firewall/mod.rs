//! The kernel's rules: closed first, swapped whole, and what they refused.
//!
//! How it is used, in this order: [`Firewall::open`] puts the closed table in place; [`Inspector::open`] and
//! [`Firewall::denials`] give two tasks that run for as long as the worker does; [`Firewall::apply`] makes a [`Plan`]
//! effective, at the start and at each change; [`Firewall::admit`] precedes each DNS answer; [`Firewall::cut`] follows
//! each change that takes something away. The gates have to listen on the [`Ports`] where the rules send connections
//! to: at the address of `down` in a gateway, at 127.0.0.1 (and ::1) in a shared namespace.
//!
//! [`Inspector::open`]: crate::inspect::Inspector::open

mod cut;
mod denials;
mod kernel;
mod opened;
mod placements;
mod plan;
mod ranges;
mod rules;
mod sets;

pub use cut::{Asked, Connection};
pub use denials::Denials;
pub use kernel::Firewall;
pub use opened::Opened;
pub use plan::{Doh, NameGate, Placement, Plan, Ports};
pub(crate) use rules::{MARK_NAMED, MARK_OPEN, MARK_REFUSE, QUEUE};
