//! What is known of the agent of a box that was made from a repository: the third fact beside intent and observation.
//!
//! The runtime says that a box runs; only its agent says that it is of use. Whoever keeps the channel to the agents makes these facts,
//! and the pure functions of this module's siblings read them.

use serde::{Deserialize, Serialize};

use crate::time::Timestamp;

/// The reason that a failed sandbox shows, and nothing else that fails has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reason {
    RepositoryUnreachable,
    RepositoryAuthFailed,
    RefNotFound,
    ImageBuildFailed,
    ImageBuildTimeout,
    /// No image fits and none may be built.
    ImageNotCached,
    ImagePullFailed,
    ContainerCreateFailed,
    AgentConnectTimeout,
    BootFailed,
    BootTimeout,
    HeartbeatLost,
    RuntimeLost,
    RuntimeError,
    ServiceFailed,
    QuotaExceeded,
    ProvisionTimeout,
}

impl Reason {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::RepositoryUnreachable => "repository_unreachable",
            Self::RepositoryAuthFailed => "repository_auth_failed",
            Self::RefNotFound => "ref_not_found",
            Self::ImageBuildFailed => "image_build_failed",
            Self::ImageBuildTimeout => "image_build_timeout",
            Self::ImageNotCached => "image_not_cached",
            Self::ImagePullFailed => "image_pull_failed",
            Self::ContainerCreateFailed => "container_create_failed",
            Self::AgentConnectTimeout => "agent_connect_timeout",
            Self::BootFailed => "boot_failed",
            Self::BootTimeout => "boot_timeout",
            Self::HeartbeatLost => "heartbeat_lost",
            Self::RuntimeLost => "runtime_lost",
            Self::RuntimeError => "runtime_error",
            Self::ServiceFailed => "service_failed",
            Self::QuotaExceeded => "quota_exceeded",
            Self::ProvisionTimeout => "provision_timeout",
        }
    }
}

/// Why a sandbox that is made from a repository failed. Free of secrets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Failure {
    pub reason: Reason,
    /// The part that failed: a phase of the boot, a step of the build.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    pub message: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// The end of what it wrote, at most a few KiB; empty when it wrote nothing.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub output_tail: String,
}

impl Failure {
    /// One of which nothing but the reason is known.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self {
            reason,
            phase: None,
            message: message.into(),
            exit_code: None,
            signal: None,
            output_tail: String::new(),
        }
    }

    /// The message, after the phase where one is known.
    pub fn in_words(&self) -> String {
        match &self.phase {
            Some(phase) => format!("{phase}: {}", self.message),
            None => self.message.clone(),
        }
    }
}

/// Where the channel to the agent stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Link {
    /// Nobody has attached yet.
    #[default]
    Expected,
    Attached,
    /// Silent for longer than its lease lasts; nothing is decided yet.
    Unresponsive,
}

impl Link {
    /// The word on the wire.
    pub fn word(self) -> &'static str {
        match self {
            Self::Expected => "Connecting",
            Self::Attached => "Attached",
            Self::Unresponsive => "Unresponsive",
        }
    }
}

/// A part of the boot that is under way.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Phase {
    /// `sync`, `setup`, `services`, `start`, `entrypoint`.
    pub name: String,
    /// Whose hook it is, where that says more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub step: Option<String>,
    pub started_at: Timestamp,
    /// How long it may go without progress; 0 when it was not said.
    #[serde(default)]
    pub timeout_seconds: u64,
    /// By when it fails unless it makes progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_at: Option<Timestamp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
    /// When its progress was last written into the history.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub told_at: Option<Timestamp>,
}

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AgentFacts {
    pub link: Link,
    /// When what these facts make of the state last changed.
    pub since: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// When the boot was complete, in this generation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_at: Option<Timestamp>,
    /// Steps that failed although the boot went on.
    #[serde(default)]
    pub warnings: u32,
    /// Optional services that were given up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed_services: Vec<String>,
    /// The last failure that was passed over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passed_over: Option<Failure>,
    /// It is over; not yet acted on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub failure: Option<Failure>,
}

impl AgentFacts {
    /// Of a box that was just made.
    pub fn expected(now: Timestamp) -> Self {
        Self {
            link: Link::Expected,
            since: now,
            phase: None,
            ready_at: None,
            warnings: 0,
            failed_services: Vec::new(),
            passed_over: None,
            failure: None,
        }
    }

    /// What keeps a sandbox that is ready from being whole; `None` when nothing does.
    pub fn complaint(&self) -> Option<String> {
        let mut said = Vec::new();
        if self.warnings > 0 {
            said.push(format!("{} steps of the boot failed and were passed over", self.warnings));
        }
        if !self.failed_services.is_empty() {
            said.push(format!("services given up: {}", self.failed_services.join(", ")));
        }
        (!said.is_empty()).then(|| said.join("; "))
    }
}
