//! What is shown of agents and their services.

use std::io;

use sandglass_bridge::wire::{Activity, Load};
use sandglass_sandbox::{
    ImageBuildId, SandboxId, Timestamp,
    lifecycle::boot::AgentFacts,
    source::RepositorySource,
    workspace::{Kind, Service},
};
use sandglass_supervise::{ports::Exit, service::state::State};
use serde::{Deserialize, Serialize};

use super::{Workspaces, output::Output};

/// The agent of one sandbox at one moment.
#[derive(Debug, Clone)]
pub struct AgentView {
    pub facts: AgentFacts,
    pub version: Option<String>,
    pub heartbeat_at: Option<Timestamp>,
    /// When it counts as unresponsive unless it is heard again.
    pub lease_expires_at: Option<Timestamp>,
    pub activity: Activity,
    pub load: Load,
}

/// One service of a sandbox at one moment.
#[derive(Debug, Clone, PartialEq)]
pub struct ServiceView {
    pub name: String,
    /// `code-server`, `ssh`, `terminal`, `bridge` or `custom`.
    pub kind: &'static str,
    /// `Disabled`, `Starting`, `Ready`, `Restarting`, `Failed` or `Stopped`; others are those of newer agents.
    pub state: String,
    pub required: bool,
    pub port: Option<u16>,
    pub restart_count: u64,
    pub last_exit: Option<Exit>,
    pub last_error: Option<String>,
    /// When the process that runs, or ran last, was started; agents of earlier versions do not tell.
    pub started_at: Option<Timestamp>,
    /// Of an SSH server, once it has told.
    pub host_key: Option<HostKey>,
}

/// By what an SSH server is known.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HostKey {
    /// `SHA256:…`.
    pub fingerprint: String,
    /// As in `known_hosts`.
    pub public_key: String,
}

/// The service that stands for the channel itself.
pub(crate) const BRIDGE: &str = "bridge";

pub(crate) fn kind(service: &Service) -> &'static str {
    match service.kind {
        Kind::Custom(_) => "custom",
        Kind::CodeServer(_) => "code-server",
        Kind::Ssh(_) => "ssh",
        Kind::Terminal => "terminal",
    }
}

impl Workspaces {
    /// What was written, from an offset on: by a service as `service.<name>`, by a hook as `boot.<phase>.<hook>`. `None` for nothing ever.
    ///
    /// # Errors
    /// When what was kept cannot be read.
    pub async fn output(&self, id: SandboxId, source: &str, from: u64) -> io::Result<Option<Output>> {
        let (outputs, source) = (self.folders.outputs(id), source.to_owned());
        let read = tokio::task::spawn_blocking(move || outputs.read(&source, from));
        read.await.map_err(io::Error::other)?
    }

    /// The last lines that were written.
    ///
    /// # Errors
    /// When what was kept cannot be read.
    pub async fn output_tail(&self, id: SandboxId, source: &str, lines: usize) -> io::Result<Option<Output>> {
        let (outputs, source) = (self.folders.outputs(id), source.to_owned());
        let read = tokio::task::spawn_blocking(move || outputs.tail(&source, lines));
        read.await.map_err(io::Error::other)?
    }

    /// The build that a sandbox waits or waited for.
    pub fn build_of(&self, id: SandboxId) -> Option<ImageBuildId> {
        self.desk(id)?.kept().build
    }

    /// What is known of the agent of a sandbox; `None` when it has none.
    pub fn agent(&self, id: SandboxId, source: &RepositorySource) -> Option<AgentView> {
        let desk = self.desk(id)?;
        let (kept, pulse) = (desk.kept(), desk.pulse().clone());
        let lease = std::time::Duration::from_secs(source.lease.heartbeat_timeout_seconds);
        Some(AgentView {
            facts: kept.facts,
            version: kept.agent_version,
            lease_expires_at: pulse.heartbeat_at.and_then(|at| at.checked_add(lease)),
            heartbeat_at: pulse.heartbeat_at,
            activity: pulse.activity,
            load: pulse.load,
        })
    }

    /// The services of a sandbox, in their order; the channel itself last.
    pub fn services(&self, id: SandboxId, source: &RepositorySource) -> Vec<ServiceView> {
        let desk = self.desk(id);
        let kept = desk.as_ref().map(|desk| desk.kept());
        let pulse = desk.as_ref().map(|desk| desk.pulse().clone()).unwrap_or_default();
        let view = |service: &Service| {
            let change = kept.as_ref().and_then(|kept| kept.services.get(&service.name));
            let health = pulse.health.iter().find(|health| health.name == service.name);
            let before = if service.enabled { State::Stopped } else { State::Disabled };
            // What is there of a heartbeat came after the last event.
            let state = health.map(|health| health.state.chars().take(32).collect());
            ServiceView {
                name: service.name.clone(),
                kind: kind(service),
                state: state.unwrap_or_else(|| format!("{:?}", change.map_or(before, |change| change.to))),
                required: service.required,
                port: service.port,
                restart_count: change.map_or(0, |change| change.restart_count),
                last_exit: change.and_then(|change| change.last_exit),
                last_error: change.and_then(|change| change.error.clone()),
                started_at: change.and_then(|change| change.started_at),
                host_key: kept.as_ref().and_then(|kept| kept.host_keys.get(&service.name).cloned()),
            }
        };
        let mut views: Vec<ServiceView> = source.services.iter().map(view).collect();
        let link = kept.map(|kept| kept.facts.link).unwrap_or_default();
        views.push(ServiceView {
            name: BRIDGE.to_owned(),
            kind: BRIDGE,
            state: match link {
                sandglass_sandbox::lifecycle::boot::Link::Expected => "Starting",
                sandglass_sandbox::lifecycle::boot::Link::Attached => "Ready",
                sandglass_sandbox::lifecycle::boot::Link::Unresponsive => "Restarting",
            }
            .to_owned(),
            required: true,
            port: None,
            restart_count: 0,
            last_exit: None,
            last_error: None,
            started_at: None,
            host_key: None,
        });
        views
    }
}
