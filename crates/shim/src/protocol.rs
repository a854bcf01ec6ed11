//! What goes over the report channel and the control socket: messages and their framing.
//!
//! Every message is JSON after its length as a big-endian `u32`. This file does no input or output, so that the
//! server can use it from an async runtime and the shim from its poll loop.
//! Invariant: a frame longer than [`MAX_FRAME`] is an error on both sides; nothing is ever buffered without bound.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::spec::{BoxEvent, BoxState};

/// The longest message that either side accepts.
pub const MAX_FRAME: usize = 1 << 20;

/// How a create ended; sent once over the report channel, which is then closed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(from = "RawReport", into = "RawReport")]
pub enum CreateReport {
    /// The agent answers and the entrypoint was started.
    Created {
        state: BoxState,
        /// Microseconds from the start of the shim to the end of each phase.
        timings: BTreeMap<String, u64>,
    },
    /// Nothing is left but the directory.
    Failed { phase: String, message: String },
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct RawReport {
    ok: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<BoxState>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    timings: BTreeMap<String, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    phase: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    message: Option<String>,
}

impl From<RawReport> for CreateReport {
    fn from(raw: RawReport) -> Self {
        match (raw.ok, raw.state) {
            (true, Some(state)) => Self::Created { state, timings: raw.timings },
            _ => Self::Failed {
                phase: raw.phase.unwrap_or_default(),
                message: raw.message.unwrap_or_else(|| "the report carried no state".into()),
            },
        }
    }
}

impl From<CreateReport> for RawReport {
    fn from(report: CreateReport) -> Self {
        match report {
            CreateReport::Created { state, timings } => {
                Self { ok: true, state: Some(state), timings, ..Self::default() }
            }
            CreateReport::Failed { phase, message } => {
                Self { ok: false, phase: Some(phase), message: Some(message), ..Self::default() }
            }
        }
    }
}

/// What may be asked over `shim.sock`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum Request {
    State,
    Pause,
    Resume,
    /// `facts.json` was replaced: read it again and set the timer.
    FactsChanged,
    /// Ask the agent to stop, wait, kill what is left, remove everything including the directory, answer, exit.
    Remove {
        #[serde(default)]
        grace_ms: u64,
    },
    /// Answers once, then sends a [`Notice`] for every event until either side closes.
    Subscribe,
}

/// The answer to a [`Request`].
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Response {
    pub ok: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state: Option<BoxState>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
    /// Why it was refused, when `ok` is false.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// What a box uses at the moment; a counter that the host does not keep is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    #[serde(default)]
    pub cpu_usec: Option<u64>,
    #[serde(default)]
    pub pids: Option<u64>,
}

/// What a subscriber receives after its answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Notice {
    pub event: BoxEvent,
    pub state: BoxState,
}

/// Why bytes are not a message.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    #[error("frame of {0} bytes is longer than {MAX_FRAME}")]
    TooLong(usize),
    #[error("frame is not the expected json: {0}")]
    Json(#[from] serde_json::Error),
}

/// One message as bytes, length first.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, FrameError> {
    let mut frame = vec![0; 4];
    serde_json::to_writer(&mut frame, message)?;
    let length = frame.len() - 4;
    if length > MAX_FRAME {
        return Err(FrameError::TooLong(length));
    }
    frame[..4].copy_from_slice(&(length as u32).to_be_bytes());
    Ok(frame)
}

/// Takes the first whole message out of `buffer`; `None` means that more bytes are needed.
pub fn decode<T: DeserializeOwned>(buffer: &mut Vec<u8>) -> Result<Option<T>, FrameError> {
    let Some(prefix) = buffer.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_be_bytes(*prefix) as usize;
    if length > MAX_FRAME {
        return Err(FrameError::TooLong(length));
    }
    if buffer.len() < 4 + length {
        return Ok(None);
    }
    let message = serde_json::from_slice(&buffer[4..4 + length]);
    buffer.drain(..4 + length);
    Ok(Some(message?))
}
