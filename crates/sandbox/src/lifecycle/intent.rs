//! An operation in flight: what the server wants and the runtime has not shown yet.

use serde::{Deserialize, Serialize};

use super::boot::Failure;
use crate::{
    ids::{ImageBuildId, SandboxId},
    pool::Origin,
    ports::runtime::RuntimeError,
    spec::{MutableFacts, Spec},
    time::Timestamp,
};

/// The one open operation of a sandbox. A delete supersedes whatever was open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Intent {
    pub sandbox_id: SandboxId,
    /// Counts the writes of this intent; every write is conditional on it.
    pub generation: u64,
    pub operation: Operation,
    pub accepted_at: Timestamp,
    /// When the operation has failed if the runtime has not shown its effect.
    pub deadline: Timestamp,
}

/// What is wanted.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Operation {
    #[serde(rename_all = "camelCase")]
    Create(Box<Create>),
    Pause,
    Resume,
    #[serde(rename_all = "camelCase")]
    Remove {
        reason: RemoveReason,
        /// Do not try again before this instant; set after a failed attempt.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        not_before: Option<Timestamp>,
        /// The last attempt's failure.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        last_error: Option<String>,
    },
}

/// A box that is to exist.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Create {
    pub spec: Spec,
    pub facts: MutableFacts,
    pub agent_token: String,
    pub route_token: String,
    /// The request came with registry credentials. They are not stored, so a restarted server cannot repeat the pull.
    pub had_credentials: bool,
    pub progress: Progress,
    /// Set when the request named a pool. The id of a warm box is that of its sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<Origin>,
}

/// How far a create has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "step")]
pub enum Progress {
    /// Written down; nothing done yet.
    Accepted,
    /// The remotes are asked for commits, and the image is looked for.
    Resolving,
    /// Another build has its turn first.
    #[serde(rename_all = "camelCase")]
    Queued { build: ImageBuildId },
    /// The image is being built.
    #[serde(rename_all = "camelCase")]
    Building { build: ImageBuildId },
    /// The image is being fetched or unpacked.
    Preparing,
    /// The runtime is making the box.
    Starting,
    /// It cannot be made. Kept until deleted or expired, so that whoever asks learns why.
    #[serde(rename_all = "camelCase")]
    Failed {
        error: StoredError,
        at: Timestamp,
        /// What there is to say beyond the error, of a sandbox that is made from a repository.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        failure: Option<Box<Failure>>,
        /// What is left of the box stays until then, for diagnosis.
        #[serde(skip_serializing_if = "Option::is_none", default)]
        keep_until: Option<Timestamp>,
    },
}

/// A [`RuntimeError`] as the store keeps it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredError {
    pub kind: crate::ports::RuntimeErrorKind,
    pub phase: String,
    pub message: String,
}

impl From<RuntimeError> for StoredError {
    fn from(e: RuntimeError) -> Self {
        Self { kind: e.kind, phase: e.phase, message: e.message }
    }
}

/// Why a sandbox goes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RemoveReason {
    /// Somebody asked for it.
    UserDelete,
    /// Its time is over.
    Expired,
    /// Nobody used it for as long as its policy says.
    Idle,
    /// The create was answered with an error, so nothing may be left of it.
    CreateFailed,
}

impl RemoveReason {
    /// The word used in status reasons and events.
    pub fn word(self) -> &'static str {
        match self {
            Self::UserDelete => "user_delete",
            Self::Expired => "ttl_expiry",
            Self::Idle => "idle_timeout",
            Self::CreateFailed => "create_failed",
        }
    }
}
