//! What the agent is told at start: boot configuration from the control plane, or flags and environment.
//!
//! Reads descriptors and the process environment once; nothing else in the crate does.

use std::fs::File;
use std::io::Read;
use std::net::TcpListener;
use std::os::fd::RawFd;
use std::path::PathBuf;

use serde::Deserialize;

use crate::envs::{self, Env};

pub const DEFAULT_PORT: u16 = 44772;
const DEFAULT_ENV_FILE: &str = "/opt/opensandbox/.env";
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
    pub user: String,
    pub env_file: PathBuf,
    pub limits: Limits,
    pub listener: Option<TcpListener>,
    pub status: Option<File>,
    /// Booted by the control plane: the box's layout is ours to complete.
    pub booted: bool,
    pub isolation: bool,
    pub isolation_config: Option<PathBuf>,
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
}

impl Settings {
    pub fn load(args: &[String]) -> Result<Start, SettingsError> {
        let flags = parse_flags(args)?;
        if let Some(text) = flags.print {
            return Ok(Start::Print(text));
        }
        match flags.boot_fd {
            Some(fd) => Self::booted(fd),
            None => Ok(Self::stand_alone(flags)),
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
        })
    }

    fn stand_alone(flags: Flags) -> Self {
        let text = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
        let mut env: Env = std::env::vars_os()
            .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
            .filter(|(k, v)| valid_pair(k, v))
            .collect();
        env.extend(flags.jupyter.into_iter().map(|(name, value)| (name.to_owned(), value)));
        let env_file = finish_env(&mut env);
        Settings {
            token: flags.token.or_else(|| text("EXECD_ACCESS_TOKEN")).unwrap_or_default(),
            port: flags.port.unwrap_or(DEFAULT_PORT),
            init: flags.init,
            entrypoint: flags.entrypoint,
            env,
            cwd: None,
            user: String::new(),
            env_file,
            limits: Limits::default(),
            listener: None,
            status: None,
            booted: false,
            isolation: false,
            isolation_config: flags
                .isolation_config
                .or_else(|| text("EXECD_ISOLATION_CONFIG").map(PathBuf::from)),
        }
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
            "init" | "runtime-init" => {
                let on =
                    inline.is_none_or(|v| matches!(v.as_str(), "1" | "t" | "T" | "true" | "TRUE" | "True"));
                flags.init |= on && name == "init";
                continue;
            }
            "version" => {
                flags.print = Some(format!("sandglass-agent {}", env!("CARGO_PKG_VERSION")));
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
            "isolation-config" => flags.isolation_config = Some(value.into()),
            "boot-fd" => flags.boot_fd = Some(value.parse().map_err(|_| number())?),
            "jupyter-host" => flags.jupyter.push(("JUPYTER_HOST", value)),
            "jupyter-token" => flags.jupyter.push(("JUPYTER_TOKEN", value)),
            // Accepted so that existing start lines keep working; nothing here depends on them.
            "log-level"
            | "graceful-shutdown-timeout"
            | "jupyter-idle-poll-interval"
            | "lifecycle-startup-status-file" => {}
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
    }
}
