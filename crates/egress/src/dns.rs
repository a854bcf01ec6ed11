//! The name gate: answers the sandbox's questions about names that the policy lets it ask, and opens the addresses of the answers before
//! they leave.
//!
//! Invariant: nothing that the sandbox sends goes to a resolver as it is, and nothing that a resolver sends goes to the sandbox as it is.
//! Questions and answers are read, decided upon, and written anew.

pub mod addresses;
pub mod answer;
pub mod gate;
pub mod probing;
pub mod question;
pub mod server;
pub mod upstream;

#[cfg(test)]
mod tests;
