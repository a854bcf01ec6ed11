//! Services that are the agent's own: the SSH server, as a helper that may end without harm, and the terminals of the API.

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use sandglass_bridge::ring::Draft;
use sandglass_bridge::wire::Class;
use sandglass_sandbox::workspace::Kind;
use sandglass_supervise::Logs;
use sandglass_supervise::ports::{BuiltinRun, Builtins as Port, Exit, SpawnError};
use sandglass_supervise::service::definition::ServiceDefinition;
use sandglass_supervise::tail::Stream;
use serde::Serialize;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::helper::{self, Helper};
use super::inside::ssh::{Said, Task};
use super::link::Link;
use super::{Document, Shared, inside, plan, processes};
use crate::command::pipes;
use crate::envs;
use crate::events::unix_millis;
use crate::http::router::Agent;
use crate::init::signal_group;

/// Host keys of SSH services, by the names of the services.
pub(super) type HostKeys = Mutex<BTreeMap<String, HostKey>>;

/// What a client that connects for the first time is to see.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct HostKey {
    /// `SHA256:…`.
    pub(super) fingerprint: String,
    /// As in `known_hosts`.
    pub(super) public_key: String,
}

pub(super) struct Builtins {
    pub(super) agent: Arc<Agent>,
    pub(super) document: Document,
    pub(super) logs: Logs,
    pub(super) link: Arc<Link>,
    pub(super) shared: Arc<Shared>,
}

impl Port for Builtins {
    fn start(&self, builtin: &str, definition: &ServiceDefinition) -> Result<BuiltinRun, SpawnError> {
        let stop = CancellationToken::new();
        let (tell, ended) = oneshot::channel();
        match builtin {
            plan::TERMINAL => {
                let stop = stop.clone();
                tokio::spawn(async move {
                    stop.cancelled().await;
                    let _ = tell.send(Ok(()));
                });
            }
            plan::SSH => {
                let ssh = self.ssh(definition)?;
                let stop = stop.clone();
                tokio::spawn(async move {
                    let _ = tell.send(ssh.run(stop).await);
                });
            }
            other => {
                return Err(SpawnError::new(format!("this agent has no service \"{other}\" of its own")));
            }
        }
        Ok(BuiltinRun { stop, ended })
    }
}

impl Builtins {
    fn ssh(&self, definition: &ServiceDefinition) -> Result<Ssh, SpawnError> {
        let workspace = &self.document.workspace;
        let told = workspace.services.iter().find(|service| service.name == definition.name);
        let Some(Kind::Ssh(told)) = told.map(|service| &service.kind) else {
            return Err(SpawnError::new("the document says nothing of its keys"));
        };
        let folder = workspace.state_dir.join("ssh");
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).map_err(|source| {
            SpawnError {
                message: format!("the folder of the host key, {}: {source}", folder.display()),
                source: Some(source),
            }
        })?;
        let mut env = envs::for_shells(&self.agent.env, &self.agent.env_file);
        self.shared.overlay(&mut env);
        let task = Task {
            port: definition.port.unwrap_or(22),
            host_key: folder.join("host_key"),
            ssh: told.clone(),
            sandbox: workspace.sandbox_id.to_string(),
            env: env.clone(),
        };
        let helper = helper::start(&self.agent, inside::SSHD, &task, &env, None)?;
        Ok(Ssh {
            helper,
            name: definition.name.clone(),
            log: self.logs.writer(&definition.log_source()),
            grace: definition.grace(),
            link: Arc::clone(&self.link),
            shared: Arc::clone(&self.shared),
        })
    }
}

/// One run of the SSH server.
struct Ssh {
    helper: Helper,
    name: String,
    log: sandglass_supervise::log::LogWriter,
    grace: std::time::Duration,
    link: Arc<Link>,
    shared: Arc<Shared>,
}

impl Ssh {
    async fn run(self, stop: CancellationToken) -> Result<(), String> {
        let Helper { pid, mut exit, stdout, stderr } = self.helper;
        tokio::spawn(pipes::discard(stderr));
        let mut lines = BufReader::new(stdout).lines();
        let (mut open, mut stopping, mut failed) = (true, false, None);
        let mut kill_at = Instant::now();
        let ended = loop {
            tokio::select! {
                line = lines.next_line(), if open => match line {
                    Ok(Some(line)) => match serde_json::from_str(&line) {
                        Ok(Said::Listening { fingerprint, public_key }) => {
                            self.shared.listening(&self.link, &self.name, HostKey { fingerprint, public_key });
                        }
                        Ok(Said::Sessions(count)) => self.shared.ssh_sessions.store(count, Ordering::Relaxed),
                        Ok(Said::Note(text)) => {
                            let time = sandglass_sandbox::Timestamp::clamped(unix_millis().try_into().unwrap_or(i64::MAX));
                            self.log.append(Stream::Stdout, format!("{text}\n").as_bytes(), time);
                        }
                        Ok(Said::Failed(reason)) => failed = Some(reason),
                        Err(_) => {}
                    },
                    _ => open = false,
                },
                ended = &mut exit => break ended.map_or(Exit::Code(255), processes::ended),
                () = stop.cancelled(), if !stopping => {
                    stopping = true;
                    kill_at = Instant::now() + self.grace;
                    signal_group(pid, libc::SIGTERM);
                }
                () = sleep_until(kill_at), if stopping => {
                    signal_group(pid, libc::SIGKILL);
                    kill_at += self.grace;
                }
            }
        };
        self.shared.ssh_sessions.store(0, Ordering::Relaxed);
        // The reason may have been written in the last moment.
        while failed.is_none() && open {
            match lines.next_line().await {
                Ok(Some(line)) => {
                    if let Ok(Said::Failed(reason)) = serde_json::from_str(&line) {
                        failed = Some(reason);
                    }
                }
                _ => open = false,
            }
        }
        match (failed, ended) {
            (Some(reason), _) => Err(reason),
            (None, Exit::Code(0)) => Ok(()),
            (None, ended) => Err(ended.to_string()),
        }
    }
}

impl Shared {
    /// A new key is told once; the same one is no news.
    fn listening(&self, link: &Link, name: &str, key: HostKey) {
        let mut keys = self.host_keys.lock().unwrap_or_else(PoisonError::into_inner);
        let known = keys.insert(name.to_owned(), key.clone());
        drop(keys);
        if known.as_ref() == Some(&key) {
            return;
        }
        let data = serde_json::json!({ "name": name, "hostKey": key });
        if let Ok(draft) = Draft::new(Class::State, jiff::Timestamp::now(), "service.host_key", &data) {
            link.emit(draft);
        }
    }

    pub(super) fn host_key(&self, name: &str) -> Option<HostKey> {
        self.host_keys.lock().unwrap_or_else(PoisonError::into_inner).get(name).cloned()
    }
}
