//! The boot of a box as data: what arrives in the agent's boot configuration.
//!
//! Times are whole seconds unless they say otherwise. Invariant: a plan that was checked is bounded, and its names and ports are
//! unambiguous.

mod check;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ports::Program;
use crate::service::definition::ServiceDefinition;
use crate::service::restart::Backoff;

pub use check::PlanError;
pub(crate) use check::{command, seconds};

/// The variable that tells hooks what the box starts from.
pub const SOURCE_VARIABLE: &str = "SANDGLASS_BOOT_SOURCE";

/// The parts of a boot, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Phase {
    Sync,
    Setup,
    Services,
    Start,
    Entrypoint,
}

impl Phase {
    pub const ALL: [Phase; 5] = [Phase::Sync, Phase::Setup, Phase::Services, Phase::Start, Phase::Entrypoint];

    pub fn name(self) -> &'static str {
        match self {
            Phase::Sync => "sync",
            Phase::Setup => "setup",
            Phase::Services => "services",
            Phase::Start => "start",
            Phase::Entrypoint => "entrypoint",
        }
    }
}

impl std::fmt::Display for Phase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What the box starts from.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Source {
    /// Nothing of the repository is there.
    #[default]
    Fresh,
    /// An image in which setup has run.
    Image,
    /// The state of an earlier box.
    Snapshot,
}

impl Source {
    pub fn name(self) -> &'static str {
        match self {
            Source::Fresh => "fresh",
            Source::Image => "image",
            Source::Snapshot => "snapshot",
        }
    }
}

/// What a failure of a step means.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum OnFailure {
    /// The boot has failed.
    Fail,
    /// The boot goes on, with a warning.
    Warn,
}

/// See the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BootPlan {
    pub source: Source,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncStep>,
    /// Only run on a fresh box.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub setup: Vec<HookStep>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub services: Vec<ServiceDefinition>,
    /// Run at every boot.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub start: Vec<HookStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entrypoint: Option<CommandSpec>,
    pub limits: BootLimits,
    pub restarts: RestartNumbers,
}

/// How services are started again, as [`Backoff`] has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RestartNumbers {
    pub budget: u32,
    pub base_millis: u64,
    pub cap_seconds: u64,
    pub healthy_seconds: u64,
}

impl Default for RestartNumbers {
    fn default() -> Self {
        RestartNumbers { budget: 5, base_millis: 1000, cap_seconds: 60, healthy_seconds: 300 }
    }
}

impl RestartNumbers {
    pub fn backoff(&self) -> Backoff {
        Backoff {
            budget: self.budget,
            base: Duration::from_millis(self.base_millis),
            cap: Duration::from_secs(self.cap_seconds),
            healthy: Duration::from_secs(self.healthy_seconds),
            ..Backoff::default()
        }
    }
}

/// Bounds on the boot as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BootLimits {
    /// However much progress there is, the boot is over by then.
    pub deadline_seconds: u64,
    /// Without progress for so long, waiting for required services fails.
    pub services_seconds: u64,
    pub entrypoint_seconds: u64,
    /// What a step has to end when it is cancelled or its time is over, and everything together when the boot is.
    pub grace_seconds: u64,
}

impl Default for BootLimits {
    fn default() -> Self {
        BootLimits {
            deadline_seconds: 2700,
            services_seconds: 120,
            entrypoint_seconds: 30,
            grace_seconds: 10,
        }
    }
}

impl BootLimits {
    pub fn deadline(&self) -> Duration {
        Duration::from_secs(self.deadline_seconds)
    }

    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_seconds)
    }
}

/// How long a step may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepLimits {
    /// Without progress.
    pub timeout_seconds: u64,
    /// With all its progress; the deadline of the boot when there is none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cap_seconds: Option<u64>,
}

/// Repositories to bring to where they shall be.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SyncStep {
    /// Handed on as it is.
    pub request: serde_json::Value,
    #[serde(default = "SyncStep::default_limits")]
    pub limits: StepLimits,
    /// By default a fresh box fails, and one that has a checkout already only warns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_failure: Option<OnFailure>,
}

impl SyncStep {
    fn default_limits() -> StepLimits {
        StepLimits { timeout_seconds: 300, cap_seconds: None }
    }

    pub fn policy(&self, source: Source) -> OnFailure {
        self.on_failure.unwrap_or(match source {
            Source::Fresh => OnFailure::Fail,
            Source::Image | Source::Snapshot => OnFailure::Warn,
        })
    }
}

/// A hook of a repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HookStep {
    /// Whose hook it is, as events and logs call it.
    pub label: String,
    #[serde(flatten)]
    pub command: CommandSpec,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<StepLimits>,
    #[serde(default = "fail")]
    pub on_failure: OnFailure,
}

fn fail() -> OnFailure {
    OnFailure::Fail
}

impl HookStep {
    pub fn limits(&self, phase: Phase) -> StepLimits {
        self.limits.unwrap_or(StepLimits {
            timeout_seconds: if phase == Phase::Setup { 300 } else { 120 },
            cap_seconds: None,
        })
    }
}

/// A command line, as an argument vector that no shell reads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CommandSpec {
    pub command: Vec<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

impl CommandSpec {
    pub fn program(&self) -> Program {
        Program {
            argv: self.command.clone(),
            env: self.env.clone(),
            cwd: self.cwd.clone(),
            user: self.user.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn plan(value: serde_json::Value) -> BootPlan {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn a_plan_says_little_when_it_wants_little() {
        let empty = plan(json!({}));
        assert_eq!(empty, BootPlan::default());
        empty.check().unwrap();
        assert_eq!(empty.restarts.backoff(), Backoff::default());
        let full = plan(json!({
            "source": "image",
            "sync": { "request": { "any": "thing" } },
            "setup": [{ "label": "web", "command": ["bash", "setup.sh"], "cwd": "/workspace/web" }],
            "services": [{ "name": "app", "command": ["npm", "start"], "port": 3000, "required": true }],
            "start": [{ "label": "web", "command": ["bash", "start.sh"], "onFailure": "warn",
                        "limits": { "timeoutSeconds": 5, "capSeconds": 60 } }],
            "entrypoint": { "command": ["sleep", "infinity"] },
            "limits": { "graceSeconds": 3 },
            "fromTheFuture": true,
        }));
        full.check().unwrap();
        assert_eq!(full.sync.as_ref().unwrap().policy(full.source), OnFailure::Warn);
        assert_eq!(full.sync.as_ref().unwrap().policy(Source::Fresh), OnFailure::Fail);
        assert_eq!(full.setup[0].limits(Phase::Setup).timeout_seconds, 300);
        assert_eq!(full.setup[0].on_failure, OnFailure::Fail);
        assert_eq!(full.start[0].limits(Phase::Start).cap_seconds, Some(60));
        assert_eq!(full.limits.deadline_seconds, 2700);
        let again: BootPlan = serde_json::from_value(serde_json::to_value(&full).unwrap()).unwrap();
        assert_eq!(again, full);
    }

    #[test]
    fn what_is_wrong_is_named() {
        let complaint = |value| plan(value).check().unwrap_err().to_string();
        let hook = |label: &str| json!({ "label": label, "command": ["true"] });
        assert_eq!(
            complaint(json!({ "setup": [hook("a"), hook("a")] })),
            "setup[1].label \"a\" is there twice"
        );
        assert_eq!(
            complaint(json!({ "start": [{ "label": "a", "command": [] }] })),
            "start[0].command must name a program"
        );
        assert_eq!(
            complaint(json!({ "limits": { "graceSeconds": 0 } })),
            "limits.graceSeconds must be between 1 and 300 seconds, not 0"
        );
        assert_eq!(
            complaint(json!({ "restarts": { "budget": 101 } })),
            "restarts.budget must be at most 100, not 101"
        );
        let service = |name: &str, port: u16| json!({ "name": name, "command": ["x"], "port": port });
        assert_eq!(
            complaint(json!({ "services": [service("a", 1), service("b", 1)] })),
            "services[1].port 1 is the port of \"a\" already"
        );
        assert_eq!(
            complaint(json!({ "services": [service("a", 1), service("a", 2)] })),
            "services[1].name \"a\" is there twice"
        );
        assert_eq!(
            complaint(json!({ "entrypoint": { "command": ["x"], "env": { "A=B": "" } } })),
            "entrypoint.env \"A=B\" cannot be an environment variable"
        );
        let many: Vec<_> = (0..21).map(|n| hook(&n.to_string())).collect();
        assert_eq!(complaint(json!({ "setup": many })), "setup has 21 hooks; at most 20 are allowed");
    }
}
