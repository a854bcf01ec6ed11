//! What a build's record is made of.

use std::time::Duration;

use sandglass_sandbox::{ImageBuildId, ImageId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    build::BuildState,
    key::{ArtifactName, BuildKey},
};

/// Somebody asked for a change of state that the table does not have: a fault of this program.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("an {what} that is {from} cannot become {to}")]
pub struct IllegalTransition {
    pub what: &'static str,
    pub from: &'static str,
    pub to: &'static str,
}

/// What at most one build at a time is made for.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Slot {
    /// The tenant's namespace; builds are not shared between tenants.
    pub namespace: Option<String>,
    /// [`crate::ports::Engine::name`] of the engine that makes it.
    pub runtime: String,
    pub key: BuildKey,
}

/// One repository at one commit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Checkout {
    /// Without credentials.
    pub url: String,
    /// What was asked for: branch, tag or commit; `None`: what the remote's HEAD names.
    pub reference: Option<String>,
    /// The full commit it stood for.
    pub commit: String,
    /// Absolute path in the image.
    pub path: String,
}

/// How an image is made from its repositories.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RecipeKind {
    Dockerfile,
    Devcontainer,
    Hooks,
    None,
}

/// A recipe as it was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recipe {
    pub kind: RecipeKind,
    /// Paths, arguments and base images, as the engine reads them. No secrets.
    pub details: serde_json::Value,
}

/// Everything an engine needs to know, without secrets: those are the vault's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Plan {
    /// Which repository it is, as tags and lists name it.
    pub repository_key: String,
    /// The primary one first.
    pub checkouts: Vec<Checkout>,
    pub recipe: Recipe,
    pub platform: String,
    pub agent_generation: u32,
    /// Whether it needs what the vault holds: build secrets or credentials.
    pub confidential: bool,
    /// Whether it may start from the image of another commit of its recipe and do only what is new. What has a cache of its own does not.
    #[serde(default)]
    pub incremental: bool,
}

/// Who goes first. Interactive before prebuild, whatever their age.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Priority {
    Interactive,
    Prebuild,
}

/// The steps of a build.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StepName {
    Resolve,
    Clone,
    Build,
    Setup,
    Sanitize,
    Export,
}

impl StepName {
    /// Every step, in order.
    pub const ALL: [Self; 6] =
        [Self::Resolve, Self::Clone, Self::Build, Self::Setup, Self::Sanitize, Self::Export];

    /// The word on the wire, in the store and in logs.
    pub fn word(self) -> &'static str {
        match self {
            Self::Resolve => "resolve",
            Self::Clone => "clone",
            Self::Build => "build",
            Self::Setup => "setup",
            Self::Sanitize => "sanitize",
            Self::Export => "export",
        }
    }

    /// The step of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|step| step.word() == word)
    }
}

/// Where a step stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum StepState {
    Pending,
    Running,
    Succeeded,
    Failed,
    Cancelled,
    Skipped,
}

/// One step of the current attempt.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepRecord {
    pub name: StepName,
    pub state: StepState,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub exit_code: Option<i32>,
}

/// Who works on the build, and until when they are believed to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// One run of one server.
    pub owner: String,
    /// Higher than that of every owner before: a late write of a former owner is recognised by it.
    pub fence: u64,
    pub until: Timestamp,
}

/// Why somebody wants a build to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Cancel {
    Requested,
    LastWaiterLeft,
    /// By the build of a newer commit.
    SupersededBy(ImageBuildId),
}

impl Cancel {
    /// The state that the build ends in.
    pub fn ends_in(self) -> BuildState {
        match self {
            Self::Requested | Self::LastWaiterLeft => BuildState::Cancelled,
            Self::SupersededBy(_) => BuildState::Superseded,
        }
    }
}

/// Something in the world that has to go, unless the build's image takes it over.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "what")]
pub enum Obligation {
    /// The build sandbox of one attempt.
    Workspace { attempt: u32 },
    /// An artifact that may exist, or come to exist until then, as the outcome of its capture is not known.
    Artifact { name: ArtifactName, until: Option<Timestamp> },
    /// The image that the attempts start from is held.
    Parent { image: ImageId },
    /// The vault keeps what the build needs in confidence.
    Secrets,
}

/// How a build that has no image ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum CauseKind {
    /// A step of the user's ended with an error. Trying again changes nothing.
    UserFailure,
    /// Registries, networks or the engine failed, also when it was tried again.
    Unavailable,
    /// The engine refused for good.
    Rejected,
    /// Whether the artifact was captured could not be found out in time; none is kept.
    CaptureLost,
    /// Its servers ended too often meanwhile.
    Interrupted,
    /// Its secrets were known only to a server that ended.
    SecretsLost,
    TimedOut,
    Cancelled,
    Superseded,
}

impl CauseKind {
    /// The stable snake-case word.
    pub fn word(self) -> &'static str {
        match self {
            Self::UserFailure => "user_failure",
            Self::Unavailable => "unavailable",
            Self::Rejected => "rejected",
            Self::CaptureLost => "capture_lost",
            Self::Interrupted => "interrupted",
            Self::SecretsLost => "secrets_lost",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Superseded => "superseded",
        }
    }

    /// Whether the same build would most likely fail again, so that asking again at once is refused.
    pub fn sticks(self) -> bool {
        matches!(self, Self::UserFailure | Self::Unavailable | Self::Rejected | Self::TimedOut)
    }
}

/// Why a build ended without an image; the same for all who waited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
#[serde(rename_all = "camelCase")]
pub struct Cause {
    pub kind: CauseKind,
    pub step: Option<StepName>,
    pub exit_code: Option<i32>,
    /// Fit for the user; no secrets.
    pub message: String,
    /// The last lines of the log, at most 200 and 8 KiB.
    pub tail: String,
}

impl Cause {
    pub fn new(kind: CauseKind, message: impl Into<String>) -> Self {
        Self { kind, step: None, exit_code: None, message: message.into(), tail: String::new() }
    }

    pub fn timed_out(after: Duration) -> Self {
        Self::new(CauseKind::TimedOut, format!("the build took longer than {} s", after.as_secs()))
    }

    pub fn cancelled(why: Cancel) -> Self {
        match why {
            Cancel::Requested => Self::new(CauseKind::Cancelled, "the build was cancelled"),
            Cancel::LastWaiterLeft => Self::new(CauseKind::Cancelled, "nobody waits for the build any more"),
            Cancel::SupersededBy(newer) => Self::new(
                CauseKind::Superseded,
                format!("the build of a newer commit took its place: {newer}"),
            ),
        }
    }
}
