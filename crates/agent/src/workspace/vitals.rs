//! What a heartbeat tells: what is in use, how the services are, how loaded the box is.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use sandglass_bridge::agent::{VitalSigns, Vitals};
use sandglass_bridge::wire::{Activity, Load, ServiceHealth};
use sandglass_supervise::Services;

use super::Shared;
use crate::http::router::Agent;

/// Clones read the same.
#[derive(Clone)]
pub(super) struct Signs {
    agent: Arc<Agent>,
    shared: Arc<Shared>,
    services: Arc<OnceLock<Services>>,
}

impl Signs {
    pub(super) fn new(agent: &Arc<Agent>, shared: Arc<Shared>) -> Self {
        Signs { agent: Arc::clone(agent), shared, services: Arc::default() }
    }

    /// The services, which come up after the channel.
    pub(super) fn tell_of(&self, services: &Services) {
        let _ = self.services.set(services.clone());
    }
}

impl Vitals for Signs {
    fn read(&self) -> VitalSigns {
        let agent = &self.agent;
        let count = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        let services = self.services.get().map(Services::snapshots).unwrap_or_default();
        VitalSigns {
            activity: Activity {
                commands: count(agent.commands.running() + agent.runs.count()),
                ptys: count(agent.terminals.running()),
                ssh_sessions: count(self.shared.ssh_sessions.load(Ordering::Relaxed)),
                leases: 0,
                proxy_connections: count(agent.proxied.count()),
            },
            services: services
                .into_iter()
                .map(|service| ServiceHealth {
                    name: service.name,
                    state: format!("{:?}", service.state),
                    restart_count: u32::try_from(service.restart_count).unwrap_or(u32::MAX),
                })
                .collect(),
            load: Load { average: load_average(), memory_bytes: None },
        }
    }
}

fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}
