//! The policy: rules for names and addresses, and what decides about each.

pub mod always;
pub mod document;
pub mod effective;
mod spans;
pub mod target;

use std::net::IpAddr;

use ipnet::IpNet;
use serde::Serialize;

/// What happens to what matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Allow,
    Deny,
}

impl Action {
    /// The word for it in documents and events.
    pub fn word(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

/// A decision and the rule that made it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub action: Action,
    /// As it was written, with its action (`deny *.example.com`), or `default`.
    pub rule: String,
}

/// The rules in force at this moment. Implementations answer from memory.
pub trait Rules: Send + Sync {
    /// About a host name: lower case, without a trailing dot.
    fn name(&self, name: &str) -> Verdict;

    /// About an address by itself, whatever name led to it: its explicit rule, or none.
    fn address(&self, address: IpAddr) -> Option<Verdict>;

    fn default_action(&self) -> Action;

    /// Every rule for addresses, for those who enforce them in the kernel.
    fn networks(&self) -> Vec<(Action, IpNet)>;
}

/// What names have led to lately, as the DNS gate has seen it.
pub trait Resolved: Send + Sync {
    /// Whether an answer for this name, which was allowed, held this address and has not expired.
    fn leads_to(&self, name: &str, address: IpAddr) -> bool;
}
