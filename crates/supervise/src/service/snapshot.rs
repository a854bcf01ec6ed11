//! What is told of a service, in heartbeats and in answers.

use sandglass_sandbox::Timestamp;
use serde::{Deserialize, Serialize};

use super::definition::Kind;
use super::state::State;
use crate::ports::Exit;

/// A service at one moment. Times are the wall's, in milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceSnapshot {
    pub name: String,
    pub kind: Kind,
    pub state: State,
    pub required: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// How often it was started again since the agent began.
    pub restart_count: u64,
    /// Restarts before it is given up; whole again after a healthy while, which shows with the next change.
    pub restarts_left: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_exit: Option<Exit>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last_error: Option<String>,
    /// Of what runs now, or ran last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub started_at: Option<Timestamp>,
    pub changed_at: Timestamp,
}
