//! What the agent is told at start: boot configuration from the control plane, or flags and environment.
//!
//! Reads descriptors and the process environment once; nothing else in the crate does.

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::RawFd;
use std::path::PathBuf;
use std::time::Duration;

use sandglass_sandbox::hooks::Hooks;
use sandglass_sandbox::schedule::parse_duration;
use serde::Deserialize;

use crate::binding::Gate;
use crate::bootstrap;
use crate::envs::{self, Env};
use crate::hooks::source::Told;
use crate::init::clone3::Compat;

pub const DEFAULT_PORT: u16 = 44772;
const DEFAULT_ENV_FILE: &str = "/opt/opensandbox/.env";
/// How long streams may take to end when the agent does.
const DEFAULT_GRACE: Duration = Duration::from_millis(200);
const DEFAULT_LOG_LEVEL: u8 = 6;
/// Run under this name, the agent is the start script: always init, and without a command an interactive shell.
const START_SCRIPT: &str = "bootstrap.sh";
const USAGE: &str = "usage: execd [--port N] [--access-token TOKEN] [--init] [-- COMMAND [ARG...]]";

/// The configuration a box is booted with; also what the control plane serialises.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BootConfig {
    pub sandbox_id: String,
    pub access_token: String,
    #[serde(default)]
    pub entrypoint: Vec<String>,
    #[serde(default)]
    pub env: Vec<(String, String)>,
    #[serde(default)]
    pub cwd: String,
    #[serde(default)]
    pub user: String,
    pub listen_fd: RawFd,
    pub status_fd: RawFd,
    #[serde(default)]
    pub cpu_millis: Option<u64>,
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    /// The box was given what isolated sessions need.
    #[serde(default)]
    pub isolation: bool,
    /// Hooks in the form of requests.
    #[serde(default)]
    pub lifecycle: Hooks,
    /// Start nothing and answer nobody until the box is assigned.
    #[serde(default)]
    pub standby: bool,
}

/// Limits as the control plane knows them, for boxes that cannot see their own cgroup.
#[derive(Debug, Clone, Copy, Default)]
pub struct Limits {
    pub cpu_millis: Option<u64>,
    pub memory_bytes: Option<u64>,
}

#[derive(Debug)]
pub struct Settings {
    pub token: String,
    pub port: u16,
    pub init: bool,
    pub entrypoint: Vec<String>,
    /// Complete environment of user processes, before the env file and request variables.
    pub env: Env,
    pub cwd: Option<String>,
    /// Whom everything that is not the agent itself runs as, in Docker's syntax. Empty: root where the control plane booted the box,
    /// otherwise the agent's own user.
    pub user: String,
    pub env_file: PathBuf,
    pub limits: Limits,
    pub listener: Option<TcpListener>,
    pub status: Option<File>,
    /// Booted by the control plane: the box's layout is ours to complete.
    pub booted: bool,
    pub isolation: bool,
    pub isolation_config: Option<PathBuf>,
    pub hooks: Hooks,
    /// Where hooks are kept that arrive later; `None` when the control plane keeps them.
    pub hooks_file: Option<PathBuf>,
    pub gate: Gate,
    /// Where a start script reads how the hook before the entrypoint goes.
    pub startup_report: Option<PathBuf>,
    pub grace: Duration,
    pub log_level: u8,
    pub log_file: Option<PathBuf>,
    pub clone3: Compat,
    /// The document of the workspace, where it is not in its usual place.
    pub workspace: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("{0}\n{USAGE}")]
    Usage(String),
    #[error("boot configuration: {0}")]
    Boot(String),
}

/// What the command line asks for.
#[derive(Debug)]
pub enum Start {
    Serve(Box<Settings>),
    Print(String),
    /// Write this process's environment.
    Dump,
}

#[derive(Default)]
struct Flags {
    port: Option<u16>,
    token: Option<String>,
    init: bool,
    boot_fd: Option<RawFd>,
    isolation_config: Option<PathBuf>,
    entrypoint: Vec<String>,
    /// Over the environment's variables of these names.
    jupyter: Vec<(&'static str, String)>,
    print: Option<String>,
    dump: bool,
    start_script: bool,
    runtime_init: bool,
    standby: bool,
    startup_report: Option<PathBuf>,
    grace: Option<Duration>,
    log_level: Option<u8>,
    workspace: Option<PathBuf>,
    user: String,
}

impl Settings {
    /// `args` begins with the name of the program.
    pub fn load(args: &[String]) -> Result<Start, SettingsError> {
        let (program, args) = args.split_first().map_or(("", args), |(first, rest)| (first.as_str(), rest));
        let flags = match program.rsplit('/').next() {
            Some(START_SCRIPT) => Flags::of_start_script(args),
            _ => parse_flags(args)?,
        };
        if let Some(text) = flags.print {
            return Ok(Start::Print(text));
        }
        if flags.dump {
            return Ok(Start::Dump);
        }
        match flags.boot_fd {
            Some(fd) => Self::booted(fd),
            None => Self::stand_alone(flags),
        }
        .map(|settings| Start::Serve(Box::new(settings)))
    }

    fn booted(fd: RawFd) -> Result<Self, SettingsError> {
        let failed = |e: String| SettingsError::Boot(e);
        let mut text = Vec::new();
        take_file(fd)
            .ok_or_else(|| failed(format!("descriptor {fd} is not open")))?
            .read_to_end(&mut text)
            .map_err(|e| failed(e.to_string()))?;
        let boot: BootConfig = serde_json::from_slice(&text).map_err(|e| failed(e.to_string()))?;
        let status =
            take_file(boot.status_fd).ok_or_else(|| failed("status descriptor is not open".into()))?;
        let listener = take_file(boot.listen_fd).ok_or_else(|| failed("listener is not open".into()))?;
        let listener = TcpListener::from(std::os::fd::OwnedFd::from(listener));
        let port = listener.local_addr().map_err(|e| failed(format!("listener: {e}")))?.port();
        let mut env: Env = boot.env.into_iter().filter(|(k, v)| valid_pair(k, v)).collect();
        if !boot.sandbox_id.is_empty() {
            env.insert("OPENSANDBOX_ID".into(), boot.sandbox_id);
        }
        let isolation_config = env.get("EXECD_ISOLATION_CONFIG").filter(|p| !p.is_empty()).map(PathBuf::from);
        boot.lifecycle.check().map_err(|e| failed(e.to_string()))?;
        let env_file = finish_env(&mut env);
        Ok(Settings {
            token: boot.access_token,
            port,
            init: true,
            entrypoint: boot.entrypoint,
            env,
            cwd: Some(boot.cwd).filter(|c| !c.is_empty()),
            user: boot.user,
            env_file,
            limits: Limits { cpu_millis: boot.cpu_millis, memory_bytes: boot.memory_bytes },
            listener: Some(listener),
            status: Some(status),
            booted: true,
            isolation: boot.isolation,
            isolation_config,
            hooks: boot.lifecycle,
            hooks_file: None,
            gate: if boot.standby { Gate::Standby } else { Gate::Open },
            startup_report: None,
            grace: DEFAULT_GRACE,
            log_level: DEFAULT_LOG_LEVEL,
            log_file: None,
            clone3: Compat::Off,
            workspace: None,
        })
    }

    fn stand_alone(flags: Flags) -> Result<Self, SettingsError> {
        let text = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let wrong = |name: &str| SettingsError::Usage(format!("invalid value of {name}"));
        let mut env: Env = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
            .filter(|(k, v)| valid_pair(k, v))
            .collect();
        let told = Told::by(|name| env.get(name).cloned());
        env.extend(flags.jupyter.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let env_file = finish_env(&mut env);
        let mut entrypoint = flags.entrypoint;
        if flags.start_script && entrypoint.is_empty() && !env.contains_key("BOOTSTRAP_CMD") {
            entrypoint.push(bootstrap::shell(&env).map_err(SettingsError::Usage)?);
        }
        let grace = match text("EXECD_API_GRACE_SHUTDOWN") {
            Some(said) => Some(parse_duration(&said).ok_or_else(|| wrong("EXECD_API_GRACE_SHUTDOWN"))?),
            None => None,
        };
        let gated = flags.runtime_init || text("EXECD_RUNTIME_INIT").is_some_and(|said| truthy(&said));
        let clone3 = text("EXECD_CLONE3_COMPAT").unwrap_or_default();
        Ok(Settings {
            token: flags.token.or_else(|| text("EXECD_ACCESS_TOKEN")).unwrap_or_default(),
            port: flags.port.unwrap_or(DEFAULT_PORT),
            init: flags.init,
            entrypoint,
            env,
            cwd: None,
            user: flags.user,
            env_file,
            limits: Limits::default(),
            listener: None,
            status: None,
            booted: false,
            isolation: false,
            isolation_config: flags
                .isolation_config
                .or_else(|| text("EXECD_ISOLATION_CONFIG").map(PathBuf::from)),
            hooks: told.hooks().map_err(|e| SettingsError::Usage(format!("hooks: {e}")))?,
            hooks_file: told.path(),
            gate: match (flags.standby, gated) {
                (true, _) => Gate::Standby,
                (false, true) => Gate::UntilInitialised,
                (false, false) => Gate::Open,
            },
            startup_report: flags.startup_report,
            grace: flags.grace.or(grace).unwrap_or(DEFAULT_GRACE),
            log_level: flags.log_level.unwrap_or(DEFAULT_LOG_LEVEL),
            log_file: text("EXECD_LOG_FILE").map(PathBuf::from),
            clone3: Compat::parse(&clone3).ok_or_else(|| wrong("EXECD_CLONE3_COMPAT"))?,
            workspace: flags.workspace,
        })
    }
}

fn truthy(text: &str) -> bool {
    matches!(text.trim().to_ascii_lowercase().as_str(), "1" | "t" | "true" | "yes" | "on")
}

impl Flags {
    /// The start script knows no flags: everything is the command.
    fn of_start_script(args: &[String]) -> Self {
        let entrypoint = args.to_vec();
        Flags { init: true, start_script: true, entrypoint, ..Flags::default() }
    }
}

fn finish_env(env: &mut Env) -> PathBuf {
    envs::strip_secrets(env);
    env.entry("PATH".into()).or_insert_with(|| envs::DEFAULT_PATH.into());
    let file = env.entry("EXECD_ENVS".into()).or_default();
    if file.is_empty() {
        DEFAULT_ENV_FILE.clone_into(file);
    }
    PathBuf::from(&*file)
}

fn valid_pair(key: &str, value: &str) -> bool {
    !key.is_empty() && !key.contains(['=', '\0']) && !value.contains('\0')
}

fn take_file(fd: RawFd) -> Option<File> {
    crate::init::adopt_descriptor(fd).map(|fd| {
        // The descriptors of the boot contract are the agent's alone; user processes must not inherit them.
        let _ = rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC);
        File::from(fd)
    })
}

fn parse_flags(args: &[String]) -> Result<Flags, SettingsError> {
    let usage = |text: String| SettingsError::Usage(text);
    let mut flags = Flags::default();
    let mut args = args.iter();
    while let Some(arg) = args.next() {
        if arg == "--" {
            flags.entrypoint.extend(args.cloned());
            break;
        }
        let Some(body) = arg.strip_prefix("--").or_else(|| arg.strip_prefix('-')) else {
            flags.entrypoint.push(arg.clone());
            flags.entrypoint.extend(args.cloned());
            break;
        };
        let (name, inline) = match body.split_once('=') {
            Some((name, value)) => (name, Some(value.to_owned())),
            None => (body, None),
        };
        match name {
            "init" | "runtime-init" | "standby" => {
                let on =
                    inline.is_none_or(|v| matches!(v.as_str(), "1" | "t" | "T" | "true" | "TRUE" | "True"));
                flags.init |= on && name == "init";
                flags.runtime_init |= on && name == "runtime-init";
                flags.standby |= on && name == "standby";
                continue;
            }
            "version" => {
                flags.print = Some(format!("sandglass-agent {}", env!("CARGO_PKG_VERSION")));
                continue;
            }
            _ if arg == bootstrap::DUMP_FLAG => {
                flags.dump = true;
                continue;
            }
            "help" | "h" => {
                flags.print = Some(USAGE.to_owned());
                continue;
            }
            _ => {}
        }
        let value = inline
            .or_else(|| args.next().cloned())
            .ok_or_else(|| usage(format!("flag needs an argument: -{name}")))?;
        let number = || usage(format!("invalid value {value:?} for flag -{name}"));
        match name {
            "port" => flags.port = Some(value.parse().map_err(|_| number())?),
            "access-token" => flags.token = Some(value).filter(|t| !t.is_empty()),
            "user" => flags.user = value,
            "workspace" => flags.workspace = Some(value.into()),
            "isolation-config" => flags.isolation_config = Some(value.into()),
            "boot-fd" => flags.boot_fd = Some(value.parse().map_err(|_| number())?),
            "jupyter-host" => flags.jupyter.push(("JUPYTER_HOST", value)),
            "jupyter-token" => flags.jupyter.push(("JUPYTER_TOKEN", value)),
            "graceful-shutdown-timeout" => flags.grace = Some(parse_duration(&value).ok_or_else(number)?),
            "log-level" => {
                flags.log_level = Some(value.parse().ok().filter(|level| *level <= 7).ok_or_else(number)?);
            }
            "lifecycle-startup-status-file" => {
                flags.startup_report = Some(PathBuf::from(value)).filter(|path| !path.as_os_str().is_empty());
            }
            // Accepted so that existing start lines keep working; nothing here depends on them.
            "jupyter-idle-poll-interval" => {}
            _ => return Err(usage(format!("flag provided but not defined: -{name}"))),
        }
    }
    Ok(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flags(args: &[&str]) -> Result<Flags, SettingsError> {
        parse_flags(&args.iter().map(|a| (*a).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn flags_in_both_spellings() {
        let parsed =
            flags(&["-port", "1", "--access-token=t=1", "-init", "--log-level", "7", "--", "a", "-b"])
                .unwrap();
        assert_eq!((parsed.port, parsed.token.as_deref(), parsed.init), (Some(1), Some("t=1"), true));
        assert_eq!(parsed.entrypoint, ["a", "-b"]);
        assert!(flags(&["--port", "x"]).is_err());
        assert!(flags(&["--nope", "x"]).is_err());
        assert!(flags(&["--port"]).is_err());
        assert!(!flags(&["--init=false"]).unwrap().init);
        assert_eq!(flags(&["--init", "--user", "ann:users", "--", "a"]).unwrap().user, "ann:users");
        let parsed = flags(&["--runtime-init", "--graceful-shutdown-timeout=1.5s", "--log-level=7"]).unwrap();
        assert_eq!((parsed.runtime_init, parsed.init, parsed.log_level), (true, false, Some(7)));
        assert_eq!(parsed.grace, Some(Duration::from_millis(1500)));
        for wrong in [["--graceful-shutdown-timeout", "1"], ["--log-level", "8"], ["--log-level", "x"]] {
            assert!(flags(&wrong).is_err(), "{wrong:?}");
        }
        let script = Flags::of_start_script(&["-c".to_owned(), "--init=false".to_owned()]);
        assert!(script.init && script.entrypoint == ["-c", "--init=false"]);
    }
}
