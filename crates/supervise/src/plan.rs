//! The boot of a box as data: what arrives in the agent's boot configuration.
//!
//! Times are whole seconds. Invariant: a plan that was checked is bounded, and its names and ports are unambiguous.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::ports::Program;
use crate::service::definition::ServiceDefinition;

/// The variable that tells hooks what the box starts from.
pub const SOURCE_VARIABLE: &str = "SANDGLASS_BOOT_SOURCE";

const MAX_HOOKS: usize = 20;
const MAX_SERVICES: usize = 32;
/// Escaped, it is the name of a folder.
const MAX_LABEL: usize = 64;
const MAX_SECONDS: u64 = 24 * 3600;
const MAX_GRACE_SECONDS: u64 = 300;
const MAX_COMMAND_BYTES: usize = 128 << 10;

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

/// The first rule that a plan breaks; `at` is where in it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at} {reason}")]
pub struct PlanError {
    pub at: String,
    pub reason: String,
}

impl PlanError {
    pub(crate) fn new(at: impl Into<String>, reason: impl Into<String>) -> Self {
        PlanError { at: at.into(), reason: reason.into() }
    }
}

impl BootPlan {
    /// Checks everything that can be checked without the box.
    pub fn check(&self) -> Result<(), PlanError> {
        let limits = &self.limits;
        seconds("limits.deadlineSeconds", limits.deadline_seconds, MAX_SECONDS)?;
        seconds("limits.servicesSeconds", limits.services_seconds, MAX_SECONDS)?;
        seconds("limits.entrypointSeconds", limits.entrypoint_seconds, MAX_SECONDS)?;
        seconds("limits.graceSeconds", limits.grace_seconds, MAX_GRACE_SECONDS)?;
        if let Some(sync) = &self.sync {
            step_limits("sync.limits", sync.limits)?;
        }
        hooks("setup", &self.setup)?;
        hooks("start", &self.start)?;
        if let Some(entrypoint) = &self.entrypoint {
            command("entrypoint", &entrypoint.command, &entrypoint.env)?;
        }
        services(&self.services)
    }
}

fn hooks(at: &str, hooks: &[HookStep]) -> Result<(), PlanError> {
    if hooks.len() > MAX_HOOKS {
        return Err(PlanError::new(
            at,
            format!("has {} hooks; at most {MAX_HOOKS} are allowed", hooks.len()),
        ));
    }
    let mut labels = BTreeSet::new();
    for (index, hook) in hooks.iter().enumerate() {
        let at = format!("{at}[{index}]");
        if hook.label.is_empty() || hook.label.len() > MAX_LABEL || hook.label.contains(char::is_control) {
            return Err(PlanError::new(
                format!("{at}.label"),
                format!("must be of 1 to {MAX_LABEL} printable bytes"),
            ));
        }
        if !labels.insert(&hook.label) {
            return Err(PlanError::new(format!("{at}.label"), format!("\"{}\" is there twice", hook.label)));
        }
        command(&at, &hook.command.command, &hook.command.env)?;
        if let Some(limits) = hook.limits {
            step_limits(&format!("{at}.limits"), limits)?;
        }
    }
    Ok(())
}

fn services(services: &[ServiceDefinition]) -> Result<(), PlanError> {
    if services.len() > MAX_SERVICES {
        return Err(PlanError::new(
            "services",
            format!("has {} entries; at most {MAX_SERVICES} are allowed", services.len()),
        ));
    }
    let mut names = BTreeSet::new();
    let mut ports = BTreeMap::new();
    for (index, service) in services.iter().enumerate() {
        let at = format!("services[{index}]");
        service.check(&at)?;
        if !names.insert(&service.name) {
            return Err(PlanError::new(format!("{at}.name"), format!("\"{}\" is there twice", service.name)));
        }
        if let Some(port) = service.port
            && let Some(other) = ports.insert(port, &service.name)
        {
            return Err(PlanError::new(
                format!("{at}.port"),
                format!("{port} is the port of \"{other}\" already"),
            ));
        }
    }
    Ok(())
}

fn step_limits(at: &str, limits: StepLimits) -> Result<(), PlanError> {
    seconds(&format!("{at}.timeoutSeconds"), limits.timeout_seconds, MAX_SECONDS)?;
    limits.cap_seconds.map_or(Ok(()), |cap| seconds(&format!("{at}.capSeconds"), cap, MAX_SECONDS))
}

pub(crate) fn seconds(at: &str, value: u64, most: u64) -> Result<(), PlanError> {
    if (1..=most).contains(&value) {
        return Ok(());
    }
    Err(PlanError::new(at, format!("must be between 1 and {most} seconds, not {value}")))
}

pub(crate) fn command(at: &str, argv: &[String], env: &BTreeMap<String, String>) -> Result<(), PlanError> {
    let wrong = |field: &str, reason: String| Err(PlanError::new(format!("{at}.{field}"), reason));
    if argv.first().is_none_or(String::is_empty) {
        return wrong("command", "must name a program".into());
    }
    if argv.iter().any(|word| word.contains('\0')) {
        return wrong("command", "has a word with a NUL byte".into());
    }
    for (name, value) in env {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            return wrong("env", format!("\"{}\" cannot be an environment variable", name.escape_debug()));
        }
    }
    let size = argv.iter().map(String::len).sum::<usize>()
        + env.iter().map(|(name, value)| name.len() + value.len()).sum::<usize>();
    if size > MAX_COMMAND_BYTES {
        return wrong(
            "command",
            format!("and its environment have {size} bytes; {MAX_COMMAND_BYTES} are allowed"),
        );
    }
    Ok(())
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
