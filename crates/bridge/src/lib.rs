//! The channel between the agent in a box and the server that owns the box.
//!
//! The agent dials out: it attaches, beats, sends what happened and reads what it is told to do. [`wire`] has the messages,
//! [`ring`] keeps what happened until the server has it, [`agent`] is the box's side, [`pull`] the same for a server that has to
//! ask, and [`server`] is the other side as a registry without sockets. Neither side knows what an event or a command is *for*.
//!
//! What holds between the two, whatever the link does:
//!
//! - Every event of a boot has a sequence number without holes; the server takes each exactly once and in order, and what had to
//!   be dropped is named by a `gap` of exactly the numbers that are missing.
//! - A command is delivered at least once and carried out once per run of the agent.
//! - Whether an agent is alive is judged by the server's monotonic clock alone. No clock of the box is ever compared with one of the server.
//! - Whoever is superseded (older generation, older boot, older attachment) is told so and stops; nothing that it says counts.

pub mod agent;
pub mod moment;
pub mod pull;
pub mod ring;
pub mod server;
pub mod wire;

pub use moment::{Moment, Monotonic};
