//! The name gate: answers the sandbox's questions about names that the policy lets it ask, and opens the addresses of the answers before
//! they leave.

pub mod addresses;
