//! Whether an agent is alive, as one table.
//!
//! ```text
//!            attach              heartbeat             silence                 silence
//! Expected ─────────► Attached ───────────► Live ─────────────► Unresponsive ─────────► Lost
//!    │                   │  first heartbeat   ▲                    │    ▲                 │
//!    │                   │  does not come     └──── heartbeat ─────┘    │                 │
//!    │                   └──────────────────────────────────────────────┘                 │
//!    └── nobody attaches ──────────────────────────────────────────────────────────► Lost─┘ attach ► Attached
//!
//! hold (the box is frozen): Expected, Lost ► Parked; Attached, Live, Unresponsive ► Held; no deadline runs. release undoes it.
//! ```
//!
//! Only the receiver's clock counts, and only how much of it went by; a deadline restarts at the moment of the input, so a clock
//! that jumps makes a deadline fire once and gives the next state its whole time.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Where a lease stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum LeaseState {
    /// Nobody has attached; somebody should.
    Expected,
    /// Attached, first heartbeat outstanding.
    Attached,
    Live,
    /// Silent for too long. Everything it says still counts, and a heartbeat makes it live again.
    Unresponsive,
    /// Silent through the grace too. Nothing counts but a new attachment.
    Lost,
    /// Attached in a box that is frozen.
    Held,
    /// Nobody attached in a box that is frozen.
    Parked,
}

/// What happens to a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Input {
    Attach,
    Heartbeat,
    /// The state's deadline passed.
    Silence,
    /// The box is about to be frozen.
    Hold,
    /// The box runs again.
    Release,
}

/// How long each state may last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseTimes {
    /// From the start of the box, or of this server, to the attachment. `None`: somebody else watches that.
    pub attach: Option<Duration>,
    /// How often the agent is told to beat; also the deadline of its first heartbeat.
    pub heartbeat_interval: Duration,
    /// From one heartbeat to `Unresponsive`.
    pub timeout: Duration,
    /// From `Unresponsive` to `Lost`.
    pub grace: Duration,
}

impl Default for LeaseTimes {
    fn default() -> Self {
        Self {
            attach: Some(Duration::from_secs(60)),
            heartbeat_interval: Duration::from_secs(15),
            timeout: Duration::from_secs(45),
            grace: Duration::from_secs(45),
        }
    }
}

/// Every transition there is. What is not here changes nothing.
pub const TABLE: &[(LeaseState, Input, LeaseState)] = {
    use Input::{Attach, Heartbeat, Hold, Release, Silence};
    use LeaseState::{Attached, Expected, Held, Live, Lost, Parked, Unresponsive};
    &[
        (Expected, Attach, Attached),
        (Expected, Silence, Lost),
        (Expected, Hold, Parked),
        (Attached, Attach, Attached),
        (Attached, Heartbeat, Live),
        (Attached, Silence, Unresponsive),
        (Attached, Hold, Held),
        (Live, Attach, Attached),
        (Live, Heartbeat, Live),
        (Live, Silence, Unresponsive),
        (Live, Hold, Held),
        (Unresponsive, Attach, Attached),
        (Unresponsive, Heartbeat, Live),
        (Unresponsive, Silence, Lost),
        (Unresponsive, Hold, Held),
        (Lost, Attach, Attached),
        (Lost, Hold, Parked),
        (Held, Attach, Held),
        (Held, Heartbeat, Held),
        (Held, Release, Attached),
        (Parked, Attach, Held),
        (Parked, Release, Expected),
    ]
};

/// The state that `input` leads to, if it leads anywhere.
pub fn next_state(state: LeaseState, input: Input) -> Option<LeaseState> {
    TABLE.iter().find(|(from, by, _)| (*from, *by) == (state, input)).map(|(_, _, to)| *to)
}

impl LeaseState {
    /// Whether the agent holds a lease: what it says counts.
    pub fn is_attached(self) -> bool {
        matches!(self, LeaseState::Attached | LeaseState::Live | LeaseState::Unresponsive | LeaseState::Held)
    }

    /// How long the state may last.
    pub fn lasts(self, times: &LeaseTimes) -> Option<Duration> {
        match self {
            LeaseState::Expected => times.attach,
            LeaseState::Attached => Some(times.heartbeat_interval),
            LeaseState::Live => Some(times.timeout),
            LeaseState::Unresponsive => Some(times.grace),
            LeaseState::Lost | LeaseState::Held | LeaseState::Parked => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [LeaseState; 7] = [
        LeaseState::Expected,
        LeaseState::Attached,
        LeaseState::Live,
        LeaseState::Unresponsive,
        LeaseState::Lost,
        LeaseState::Held,
        LeaseState::Parked,
    ];
    const INPUTS: [Input; 5] = [Input::Attach, Input::Heartbeat, Input::Silence, Input::Hold, Input::Release];

    #[test]
    fn every_state_meets_every_input() {
        let matrix: Vec<String> = STATES
            .iter()
            .map(|state| {
                let cells: Vec<String> = INPUTS
                    .iter()
                    .map(|input| next_state(*state, *input).map_or("·".to_owned(), |to| format!("{to:?}")))
                    .collect();
                format!("{state:?}: {}", cells.join(" "))
            })
            .collect();
        let expected = [
            "Expected: Attached · Lost Parked ·",
            "Attached: Attached Live Unresponsive Held ·",
            "Live: Attached Live Unresponsive Held ·",
            "Unresponsive: Attached Live Lost Held ·",
            "Lost: Attached · · Parked ·",
            "Held: Held Held · · Attached",
            "Parked: Held · · · Expected",
        ];
        assert_eq!(matrix, expected);
    }

    #[test]
    fn the_table_says_one_thing_about_each_pair() {
        for (index, (from, by, _)) in TABLE.iter().enumerate() {
            assert!(TABLE[index + 1..].iter().all(|(f, b, _)| (f, b) != (from, by)), "{from:?} {by:?}");
        }
    }

    #[test]
    fn a_state_with_a_deadline_has_somewhere_to_go() {
        let times = LeaseTimes::default();
        for state in STATES {
            assert_eq!(
                state.lasts(&times).is_some(),
                next_state(state, Input::Silence).is_some(),
                "{state:?}"
            );
        }
    }
}
