//! What leaves a sandbox: the policy that decides, the gates that enforce it, and the vault that lends credentials to requests.
//!
//! Runs as one process beside each sandbox that has a policy, where the sandbox cannot reach it. Invariant: what has not been allowed is
//! not let through, also before the process is ready, while it restarts and after it has died: the kernel's rules stay, and they let through
//! only what somebody alive has admitted.

pub mod absence;
pub mod audit;
pub mod control;
mod diagnostics;
pub mod dns;
pub mod enforcer;
pub mod firewall;
pub mod handed;
pub mod inspect;
pub mod intercept;
pub mod outbound;
pub mod plane;
pub mod policy;
#[cfg(test)]
mod rehearsal;
pub mod resolved;
pub mod settings;
pub mod state;
pub mod supervisor;
pub mod vault;
pub mod worker;
