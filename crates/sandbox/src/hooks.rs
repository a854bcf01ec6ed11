//! Commands around the life of a sandbox: one before its entrypoint, one before its end, and others on a schedule.
//!
//! The form in which they are kept and in which they travel to the agent is the one that requests have.
//! Invariant: hooks that were checked are bounded, and each schedule in them has a next time.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};

use crate::schedule::{Schedule, ScheduleError};

/// How long a hook may run when it does not say.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);
/// The variable in which hooks travel to an agent that gets no boot configuration.
pub const VARIABLE: &str = "OPENSANDBOX_LIFECYCLE";

/// Each periodic hook is a timer and some memory of the agent.
const MAX_PERIODIC: usize = 64;
const MAX_NAME: usize = 128;
/// Well below the longest variable that a kernel passes on.
const MAX_BYTES: usize = 64 << 10;
const MAX_PRE_START_SECONDS: u64 = 10_800;
const MAX_PERIODIC_SECONDS: u64 = 300;
/// Longer than this no removal waits for a hook.
pub const MAX_PRE_STOP: Duration = Duration::from_secs(60);
/// How long the hook before the end may run when it does not say.
pub const DEFAULT_PRE_STOP: Duration = Duration::from_secs(10);

/// See the module documentation.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hooks {
    #[serde(default, alias = "pre_start", skip_serializing_if = "Option::is_none")]
    pub pre_start: Option<Hook>,
    /// Run by the server through the agent before the box is stopped, if it runs then.
    #[serde(default, alias = "pre_stop", skip_serializing_if = "Option::is_none")]
    pub pre_stop: Option<Hook>,
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "null_is_empty")]
    pub periodic: Vec<PeriodicHook>,
}

/// A command that runs once, before the entrypoint or before the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// An argument vector; no shell reads it.
    pub command: Vec<String>,
    #[serde(default, alias = "timeout_seconds", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

/// A command that runs again and again, never twice at a time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PeriodicHook {
    pub name: String,
    pub schedule: String,
    pub command: Vec<String>,
    #[serde(default, alias = "timeout_seconds", skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

/// Why hooks cannot be kept; `at` is where in the request.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{at} {reason}")]
pub struct HookError {
    pub at: String,
    pub reason: String,
}

impl HookError {
    fn new(at: impl Into<String>, reason: impl ToString) -> Self {
        Self { at: at.into(), reason: reason.to_string() }
    }
}

fn null_is_empty<'de, D: serde::Deserializer<'de>>(from: D) -> Result<Vec<PeriodicHook>, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

fn timeout(seconds: Option<u64>) -> Duration {
    seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs)
}

impl Hook {
    pub fn timeout(&self) -> Duration {
        timeout(self.timeout_seconds)
    }
}

impl PeriodicHook {
    pub fn timeout(&self) -> Duration {
        timeout(self.timeout_seconds)
    }

    pub fn schedule(&self) -> Result<Schedule, ScheduleError> {
        self.schedule.parse()
    }
}

impl Hooks {
    /// Whether there is nothing to run.
    pub fn is_empty(&self) -> bool {
        self.pre_start.is_none() && self.pre_stop.is_none() && self.periodic.is_empty()
    }

    /// How long a removal waits for the hook before the end.
    pub fn pre_stop_timeout(&self) -> Duration {
        let asked = self.pre_stop.as_ref().and_then(|hook| hook.timeout_seconds);
        asked.map_or(DEFAULT_PRE_STOP, Duration::from_secs).min(MAX_PRE_STOP)
    }

    /// Reads what [`Hooks::to_json`] or a client wrote, and checks it.
    pub fn parse(json: &str) -> Result<Self, HookError> {
        let wrong = |e: serde_json::Error| HookError::new("lifecycle", e);
        let value: serde_json::Value = serde_json::from_str(json).map_err(wrong)?;
        if !value.is_object() {
            return Err(HookError::new("lifecycle", "must be an object"));
        }
        let hooks: Self = serde_json::from_value(value).map_err(wrong)?;
        hooks.check()?;
        Ok(hooks)
    }

    /// Compact, as it travels.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("plain data with text keys can always be written as JSON")
    }

    /// The first rule that is broken.
    pub fn check(&self) -> Result<(), HookError> {
        if let Some(hook) = &self.pre_start {
            command(&hook.command, "lifecycle.preStart")?;
            seconds(hook.timeout_seconds, MAX_PRE_START_SECONDS, "lifecycle.preStart")?;
        }
        if let Some(hook) = &self.pre_stop {
            command(&hook.command, "lifecycle.preStop")?;
            seconds(hook.timeout_seconds, MAX_PRE_STOP.as_secs(), "lifecycle.preStop")?;
        }
        if self.periodic.len() > MAX_PERIODIC {
            let reason = format!("has {} hooks; at most {MAX_PERIODIC} are kept", self.periodic.len());
            return Err(HookError::new("lifecycle.periodic", reason));
        }
        let mut names = BTreeSet::new();
        for (index, hook) in self.periodic.iter().enumerate() {
            let at = format!("lifecycle.periodic[{index}]");
            let name = hook.name.trim();
            if name.is_empty() || name.len() > MAX_NAME || name.chars().any(char::is_control) {
                let reason = format!("must be 1 to {MAX_NAME} bytes without control characters");
                return Err(HookError::new(format!("{at}.name"), reason));
            }
            if !names.insert(name) {
                return Err(HookError::new(format!("{at}.name"), "is the name of another hook"));
            }
            hook.schedule().map_err(|e| HookError::new(format!("{at}.schedule"), e))?;
            command(&hook.command, &at)?;
            seconds(hook.timeout_seconds, MAX_PERIODIC_SECONDS, &at)?;
        }
        let bytes = self.to_json().len();
        if bytes > MAX_BYTES {
            let reason = format!("has {bytes} bytes; at most {MAX_BYTES} are kept");
            return Err(HookError::new("lifecycle", reason));
        }
        Ok(())
    }
}

fn command(words: &[String], at: &str) -> Result<(), HookError> {
    let reason = if words.first().is_none_or(|word| word.trim().is_empty()) {
        "must begin with a program"
    } else if words.iter().any(|word| word.contains('\0')) {
        "must not contain a NUL byte"
    } else {
        return Ok(());
    };
    Err(HookError::new(format!("{at}.command"), reason))
}

fn seconds(asked: Option<u64>, most: u64, at: &str) -> Result<(), HookError> {
    match asked {
        Some(seconds) if !(1..=most).contains(&seconds) => {
            Err(HookError::new(format!("{at}.timeoutSeconds"), format!("must be from 1 to {most}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn periodic(name: &str, schedule: &str) -> String {
        format!(r#"{{"name":"{name}","schedule":"{schedule}","command":["true"]}}"#)
    }

    #[test]
    fn hooks_travel_as_they_were_asked_for() {
        let text = r#"{"preStart":{"command":["a","b c"],"timeoutSeconds":5},"periodic":[{"name":"n","schedule":"@every 5s","command":["true"]}]}"#;
        let hooks = Hooks::parse(text).unwrap();
        assert_eq!(hooks.to_json(), text);
        let pre_start = hooks.pre_start.as_ref().unwrap();
        assert_eq!((pre_start.timeout().as_secs(), hooks.periodic[0].timeout()), (5, DEFAULT_TIMEOUT));
        for nothing in ["{}", r#"{"preStart":null,"periodic":null}"#, r#"{"periodic":[]}"#] {
            assert!(Hooks::parse(nothing).unwrap().is_empty(), "{nothing}");
        }
    }

    #[test]
    fn the_refusal_names_the_place() {
        let list = |hooks: &[String]| format!(r#"{{"periodic":[{}]}}"#, hooks.join(","));
        let many: Vec<String> = (0..=MAX_PERIODIC).map(|n| periodic(&n.to_string(), "@daily")).collect();
        let large = format!(r#"{{"preStart":{{"command":["{}"]}}}}"#, "x".repeat(MAX_BYTES));
        for (text, at) in [
            ("[]".into(), "lifecycle"),
            (r#"{"preStart":{"command":[]}}"#.into(), "lifecycle.preStart.command"),
            (r#"{"preStart":{"command":[" "]}}"#.into(), "lifecycle.preStart.command"),
            (r#"{"preStart":{"command":["a","\u0000"]}}"#.into(), "lifecycle.preStart.command"),
            (
                r#"{"preStart":{"command":["a"],"timeoutSeconds":0}}"#.into(),
                "lifecycle.preStart.timeoutSeconds",
            ),
            (r#"{"preStop":{"command":[]}}"#.into(), "lifecycle.preStop.command"),
            (
                r#"{"preStop":{"command":["a"],"timeoutSeconds":61}}"#.into(),
                "lifecycle.preStop.timeoutSeconds",
            ),
            (list(&[periodic("a", "@daily"), periodic(" a ", "@daily")]), "lifecycle.periodic[1].name"),
            (list(&[periodic("", "@daily")]), "lifecycle.periodic[0].name"),
            (list(&[periodic("a\\n", "@daily"), periodic("b\\nc", "@daily")]), "lifecycle.periodic[1].name"),
            (list(&[periodic("a", "61 * * * *")]), "lifecycle.periodic[0].schedule"),
            (list(&many), "lifecycle.periodic"),
            (large, "lifecycle"),
        ] {
            let error = Hooks::parse(&text).unwrap_err();
            assert_eq!(error.at, at, "{error}");
        }
    }
}
