//! What is shown of agents and their services.

use sandglass_bridge::wire::{Activity, Load};
use sandglass_sandbox::{
    SandboxId, Timestamp,
    lifecycle::boot::AgentFacts,
    source::RepositorySource,
    workspace::{Kind, Service},
};
use sandglass_supervise::{ports::Exit, service::state::State};

use super::Workspaces;

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
            // A heartbeat is newer than the last event that came.
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
        });
        views
    }
}
