//! What server and agent may expect of each other: one generation number, negotiated down.
//!
//! A box keeps the agent that it was started with, so a server meets older ones after an upgrade, and newer ones after a downgrade.
//! Invariant: whatever an agent of some generation understands, every later one understands as well, and [`GENERATION`] grows with
//! every change of the surface that the agent's tests freeze.

use std::{fmt, str::FromStr};

/// The generation of this program's agent, and the newest that this server knows to use.
pub const GENERATION: u32 = 3;
/// The oldest generation that an agent and a server of this version still talk to.
pub const OLDEST: u32 = 1;
/// Where an agent tells its generation, in answers of `/ping` and `/ready` that clients take no notice of.
pub const HEADER: &str = "x-sandglass-agent";

/// What a server uses of an agent that not every generation has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Feature {
    /// Hooks in the boot configuration, and `GET /ready`, which tells when they and the entrypoint have been started.
    Hooks,
    /// `POST /internal/assign` for boxes that were started with `standby` in their boot configuration.
    Standby,
    /// The document of a workspace ([`crate::workspace`]), and what is below `/v1/workspace`.
    Workspace,
}

impl Feature {
    /// The generation that brought it.
    pub fn since(self) -> u32 {
        match self {
            Self::Hooks => 2,
            Self::Standby | Self::Workspace => 3,
        }
    }
}

/// What an agent says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agent {
    pub generation: u32,
    /// The oldest server that it still talks to.
    pub oldest: u32,
}

impl Agent {
    /// This program's.
    pub const OURS: Self = Self { generation: GENERATION, oldest: OLDEST };
    /// One that says nothing: from before there were generations, or another implementation of the same API.
    pub const SILENT: Self = Self { generation: 1, oldest: 1 };

    /// The generation that this server and that agent use with each other: the newest that both know. What is below its range or ours
    /// is used as if it said nothing, for the API that every client uses has no generations.
    pub fn agreed(self) -> u32 {
        let common = self.generation.min(GENERATION);
        if common < self.oldest.max(OLDEST) { 1 } else { common }
    }

    /// Whether the server may use that feature towards it.
    pub fn has(self, feature: Feature) -> bool {
        self.agreed() >= feature.since()
    }
}

impl fmt::Display for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generation={}; oldest={}", self.generation, self.oldest)
    }
}

/// The text was not written by an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("is not what an agent says of itself")]
pub struct NotAnAgent;

impl FromStr for Agent {
    type Err = NotAnAgent;

    /// Reads what it knows and leaves out what a newer agent may have added.
    fn from_str(text: &str) -> Result<Self, NotAnAgent> {
        let get = |name: &str| {
            let pair = text.split(';').filter_map(|pair| pair.trim().split_once('='));
            pair.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok())
        };
        let generation = get("generation").filter(|generation| *generation > 0).ok_or(NotAnAgent)?;
        Ok(Self { generation, oldest: get("oldest").unwrap_or(1) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_that_both_know_is_used() {
        let agent = |generation, oldest| Agent { generation, oldest };
        assert_eq!(Agent::OURS.agreed(), GENERATION);
        assert_eq!(Agent::SILENT.agreed(), 1);
        assert_eq!(agent(GENERATION + 5, 1).agreed(), GENERATION, "newer: within what this server knows");
        assert_eq!(agent(GENERATION + 9, GENERATION + 1).agreed(), 1, "has forgotten this server");
        assert!(Agent::OURS.has(Feature::Hooks) && !Agent::SILENT.has(Feature::Hooks));
        assert!(agent(GENERATION + 5, 1).has(Feature::Hooks));
    }

    #[test]
    fn it_is_read_as_it_is_written_and_forgivingly() {
        assert_eq!(Agent::OURS.to_string().parse(), Ok(Agent::OURS));
        let newer = "generation=7; oldest=3; colour=blue";
        assert_eq!(newer.parse(), Ok(Agent { generation: 7, oldest: 3 }));
        for text in ["", "generation=x", "generation=0", "oldest=1", "nginx"] {
            assert_eq!(text.parse::<Agent>(), Err(NotAnAgent), "{text}");
        }
    }
}
