//! What happened to a sandbox.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use crate::time::WireTime;

/// One thing that happened, or one frame of the stream.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SandboxEvent {
    /// Grows strictly within one sandbox; also the id of the frame.
    pub seq: u64,
    /// `<family>.<word>`, for instance `sandbox.state_changed`; clients must tolerate others.
    #[serde(rename = "type")]
    pub kind: String,
    pub time: WireTime,
    /// Of the sandbox that it happened to. A sandbox has one box in its life so far, so it is 1.
    pub generation: u64,
    /// What the type tells: for a change of state `to`, `from` where it is known, and `reason`; for `sandbox.snapshot` the sandbox.
    #[schema(value_type = Object)]
    pub data: Map<String, Value>,
}

/// A part of a sandbox's history, oldest first.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "camelCase")]
pub struct SandboxEventPage {
    pub sandbox_id: String,
    pub items: Vec<SandboxEvent>,
    /// Of the oldest event that is kept; absent when there is none yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_seq: Option<u64>,
    /// Of the newest event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_seq: Option<u64>,
    /// What to ask for as `after` to read on.
    pub next_after: u64,
    /// Events after `nextAfter` exist; with `types` they need not be of a wanted type.
    pub has_more: bool,
}
