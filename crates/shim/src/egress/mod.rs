//! The egress policy's place: a network namespace between the box and the host, and the program that decides in it.
//!
//! ```text
//! host  <host interface> ── up  [middle namespace: sandglass-egress, its rules]  down ── eth0  box
//! ```
//!
//! The box's only way out leads through the middle, which it cannot enter, name or see. Its address stays its own: the
//! host's side is the same with and without a policy. [`middle`] makes the namespace, [`start`] the program's process,
//! [`view`] what that process sees, [`enforcer`] keeps it running, [`words`] is what it says.
//! Invariant: nothing is forwarded before the program has said for the first time that it enforces. From then on the
//! kernel's rules decide, and they stay when the program ends.

mod enforcer;
mod log;
mod middle;
mod probe;
mod start;
mod view;
mod words;

pub use enforcer::{Enforcer, mark};
pub use probe::{in_middle, probe};
pub use view::authority;
pub use words::{Event, Told};

/// Suffix of the id under which the program has a control group of its own, beside the box's: pausing the box must not
/// stop it, and the box's limits are not its.
const GROUP: &str = ".egress";

/// The name of the program's control group.
pub fn group_of(id: &str) -> String {
    format!("{id}{GROUP}")
}
