//! Which plans are accepted.

use std::collections::{BTreeMap, BTreeSet};

use super::{BootPlan, HookStep, StepLimits};
use crate::service::definition::ServiceDefinition;

const MAX_HOOKS: usize = 20;
const MAX_SERVICES: usize = 32;
/// Escaped, it is the name of a folder.
const MAX_LABEL: usize = 64;
const MAX_SECONDS: u64 = 24 * 3600;
const MAX_RESTARTS: u32 = 100;
const MAX_GRACE_SECONDS: u64 = 300;
const MAX_COMMAND_BYTES: usize = 128 << 10;

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
        let restarts = &self.restarts;
        if restarts.budget > MAX_RESTARTS {
            let reason = format!("must be at most {MAX_RESTARTS}, not {}", restarts.budget);
            return Err(PlanError::new("restarts.budget", reason));
        }
        if !(1..=MAX_SECONDS * 1000).contains(&restarts.base_millis) {
            let reason = format!("must be between 1 and {} milliseconds", MAX_SECONDS * 1000);
            return Err(PlanError::new("restarts.baseMillis", reason));
        }
        seconds("restarts.capSeconds", restarts.cap_seconds, MAX_SECONDS)?;
        seconds("restarts.healthySeconds", restarts.healthy_seconds, MAX_SECONDS)?;
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
