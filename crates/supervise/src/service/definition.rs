//! A service as data.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::code_server::CodeServer;
use crate::plan::{PlanError, command, seconds};
use crate::ports::Program;

const MAX_NAME: usize = 63;
const MAX_PATH: usize = 1024;

/// What kind of service it is, for those who show it or reach it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    #[default]
    Custom,
    CodeServer,
    Ssh,
    Terminal,
    Bridge,
}

/// What runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Run {
    /// A program in the foreground, as an argument vector.
    Command(Vec<String>),
    /// A part of the agent.
    Builtin(String),
    /// The editor, looked for in the box when it starts.
    CodeServer(CodeServer),
}

/// When a service that ended is started again. One that ends before it was ready has failed, whatever its exit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RestartPolicy {
    #[default]
    Always,
    OnFailure,
    Never,
}

/// How to tell that a service answers. All of them look at the loopback of the box.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Probe {
    #[serde(flatten)]
    pub check: Check,
    #[serde(default = "ten")]
    pub interval_seconds: u64,
    #[serde(default = "five")]
    pub timeout_seconds: u64,
    /// After so many failures in a row, a service that was ready is ended and started again.
    #[serde(default = "three")]
    pub threshold: u32,
}

/// What a probe does.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "camelCase")]
pub enum Check {
    /// A connection is accepted.
    Tcp {
        /// The service's own when left out.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
    },
    /// The answer to a GET has a status below 400.
    Http {
        #[serde(default, skip_serializing_if = "Option::is_none")]
        port: Option<u16>,
        #[serde(default = "root")]
        path: String,
    },
    /// A command ends with 0.
    Exec { command: Vec<String> },
}

fn ten() -> u64 {
    10
}

fn five() -> u64 {
    5
}

fn three() -> u32 {
    3
}

fn root() -> String {
    "/".into()
}

fn yes() -> bool {
    true
}

fn is_true(value: &bool) -> bool {
    *value
}

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ServiceDefinition {
    pub name: String,
    #[serde(default)]
    pub kind: Kind,
    #[serde(flatten)]
    pub run: Run,
    /// Where it listens, on the loopback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u16>,
    /// With a port and no probe, a connection to that port, or the editor's own health; with neither, staying alive for a moment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Probe>,
    #[serde(default)]
    pub restart: RestartPolicy,
    /// Without it the box is not ready, and of no use when it is gone for good.
    #[serde(default)]
    pub required: bool,
    #[serde(default = "yes", skip_serializing_if = "is_true")]
    pub enabled: bool,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<PathBuf>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// From its start until its probe succeeds.
    #[serde(default = "ServiceDefinition::default_ready")]
    pub ready_seconds: u64,
    /// From being asked to end until it is killed.
    #[serde(default = "ten")]
    pub grace_seconds: u64,
}

impl ServiceDefinition {
    fn default_ready() -> u64 {
        60
    }

    /// A service with the defaults of one that is read.
    pub fn new(name: impl Into<String>, run: Run) -> Self {
        ServiceDefinition {
            name: name.into(),
            kind: Kind::default(),
            run,
            port: None,
            probe: None,
            restart: RestartPolicy::default(),
            required: false,
            enabled: true,
            env: BTreeMap::new(),
            cwd: None,
            user: None,
            ready_seconds: Self::default_ready(),
            grace_seconds: ten(),
        }
    }

    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_seconds)
    }

    /// The probe that counts.
    pub fn effective_probe(&self) -> Option<Probe> {
        self.probe.clone().or_else(|| {
            let port = Some(self.port?);
            let check = match &self.run {
                // Its own word for being up, which comes later than the open port.
                Run::CodeServer(_) => Check::Http { port, path: CodeServer::HEALTH.into() },
                Run::Command(_) | Run::Builtin(_) => Check::Tcp { port },
            };
            Some(Probe { check, interval_seconds: ten(), timeout_seconds: five(), threshold: three() })
        })
    }

    /// A command with this service's environment, folder and user.
    pub fn program(&self, argv: Vec<String>) -> Program {
        Program { argv, env: self.env.clone(), cwd: self.cwd.clone(), user: self.user.clone() }
    }

    /// The log that its output is kept in.
    pub fn log_source(&self) -> String {
        format!("service.{}", self.name)
    }

    pub(crate) fn check(&self, at: &str) -> Result<(), PlanError> {
        let wrong = |field: &str, reason: String| Err(PlanError::new(format!("{at}.{field}"), reason));
        if !is_name(&self.name) {
            return wrong(
                "name",
                format!("must be of 1 to {MAX_NAME} lower-case letters, digits and inner hyphens"),
            );
        }
        match &self.run {
            Run::Command(argv) => command(at, argv, &self.env)?,
            Run::Builtin(name) if name.is_empty() => {
                return wrong("builtin", "must name a part of the agent".into());
            }
            Run::Builtin(_) => {}
            Run::CodeServer(_) if self.port.is_none() => {
                return wrong("port", "is needed by the editor".into());
            }
            Run::CodeServer(editor) => editor.check(&format!("{at}.codeServer"))?,
        }
        if self.port == Some(0) {
            return wrong("port", "must not be 0".into());
        }
        seconds(&format!("{at}.readySeconds"), self.ready_seconds, 3600)?;
        seconds(&format!("{at}.graceSeconds"), self.grace_seconds, 300)?;
        self.probe.as_ref().map_or(Ok(()), |probe| probe.check(&format!("{at}.probe"), self.port))
    }
}

impl Probe {
    pub fn interval(&self) -> Duration {
        Duration::from_secs(self.interval_seconds)
    }

    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout_seconds)
    }

    fn check(&self, at: &str, own: Option<u16>) -> Result<(), PlanError> {
        let wrong = |field: &str, reason: &str| Err(PlanError::new(format!("{at}.{field}"), reason));
        match &self.check {
            Check::Tcp { port } | Check::Http { port, .. } if port.or(own).is_none_or(|port| port == 0) => {
                return wrong("port", "must be given, here or for the service");
            }
            Check::Http { path, .. }
                if !path.starts_with('/')
                    || path.len() > MAX_PATH
                    || path.bytes().any(|byte| !byte.is_ascii_graphic()) =>
            {
                return wrong("path", "must begin with a slash and have no spaces or control characters");
            }
            Check::Exec { command: argv } => command(at, argv, &BTreeMap::new())?,
            Check::Tcp { .. } | Check::Http { .. } => {}
        }
        seconds(&format!("{at}.intervalSeconds"), self.interval_seconds, 3600)?;
        seconds(&format!("{at}.timeoutSeconds"), self.timeout_seconds, 300)?;
        if !(1..=100).contains(&self.threshold) {
            return wrong("threshold", "must be between 1 and 100");
        }
        Ok(())
    }
}

fn is_name(name: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    name.len() <= MAX_NAME
        && name.bytes().all(|byte| plain(byte) || byte == b'-')
        && name.bytes().next().is_some_and(plain)
        && name.bytes().last().is_some_and(plain)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: serde_json::Value) -> ServiceDefinition {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn each_way_to_run_has_its_field() {
        let command = read(json!({ "name": "app", "command": ["npm", "start"], "port": 3000 }));
        assert_eq!(command.run, Run::Command(vec!["npm".into(), "start".into()]));
        assert_eq!(command.effective_probe().unwrap().check, Check::Tcp { port: Some(3000) });
        assert!(command.enabled && !command.required && command.restart == RestartPolicy::Always);
        let builtin = read(json!({ "name": "ssh", "kind": "ssh", "builtin": "ssh" }));
        assert_eq!((builtin.kind, builtin.run), (Kind::Ssh, Run::Builtin("ssh".into())));
        let editor = read(json!({ "name": "code-server", "kind": "code-server", "port": 8080,
            "codeServer": { "folder": "/workspace" } }));
        assert!(matches!(editor.run, Run::CodeServer(_)));
        let check = Check::Http { port: Some(8080), path: "/healthz".into() };
        assert_eq!(editor.effective_probe().unwrap().check, check);
        let probed = read(json!({ "name": "app", "command": ["x"], "restart": "onFailure",
            "probe": { "type": "http", "port": 80, "path": "/ok", "timeoutSeconds": 1 } }));
        let probe = probed.probe.clone().unwrap();
        assert_eq!(probe.check, Check::Http { port: Some(80), path: "/ok".into() });
        assert_eq!((probe.interval_seconds, probe.timeout_seconds, probe.threshold), (10, 1, 3));
        for definition in [command, editor, probed] {
            definition.check("s").unwrap();
            assert_eq!(read(serde_json::to_value(&definition).unwrap()), definition);
        }
        assert!(serde_json::from_value::<ServiceDefinition>(json!({ "name": "app" })).is_err());
    }

    #[test]
    fn what_is_wrong_is_named() {
        let complaint = |value| read(value).check("s").unwrap_err().to_string();
        for name in ["", "-a", "a-", "A", "a.b", &"a".repeat(64)] {
            assert!(complaint(json!({ "name": name, "command": ["x"] })).starts_with("s.name must"));
        }
        let probed =
            |probe: serde_json::Value| complaint(json!({ "name": "a", "command": ["x"], "probe": probe }));
        assert!(probed(json!({ "type": "tcp" })).starts_with("s.probe.port must be given"));
        assert!(probed(json!({ "type": "http", "port": 1, "path": "a b" })).starts_with("s.probe.path must"));
        assert!(probed(json!({ "type": "exec", "command": [] })).starts_with("s.probe.command must"));
        assert!(probed(json!({ "type": "tcp", "port": 1, "threshold": 0 })).starts_with("s.probe.threshold"));
        assert!(
            probed(json!({ "type": "tcp", "port": 1, "timeoutSeconds": 0 }))
                .starts_with("s.probe.timeoutSeconds must be between 1 and 300")
        );
    }
}
