//! One container as the engine shows it, in our words: from an inspect, or from a list, which tells less.
//!
//! Pure. Nothing of the engine's library gets past this file towards an observation.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
};

use bollard::models::{
    ContainerInspectResponse, ContainerStateStatusEnum as Word, ContainerSummary, ContainerSummaryStateEnum,
    EndpointSettings, HostConfig, PortMap,
};
use sandglass_sandbox::{Timestamp, spec::Limits};

use super::labels::instant;

/// What the engine's state words come down to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status {
    /// Made and never started.
    Created,
    Running,
    Paused,
    /// Ended by itself, or on its way out.
    Ended,
}

/// See the module documentation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Container {
    pub key: String,
    /// Without the slash.
    pub name: String,
    pub labels: HashMap<String, String>,
    pub status: Status,
    /// The reference it was made from.
    pub image: String,
    pub image_id: String,
    pub entrypoint: Vec<String>,
    pub command: Vec<String>,
    pub env: Vec<(String, String)>,
    pub limits: Limits,
    pub created_at: Option<Timestamp>,
    pub started_at: Option<Timestamp>,
    pub finished_at: Option<Timestamp>,
    pub exit_code: Option<i32>,
    pub out_of_memory: bool,
    /// What the engine has to say about its end.
    pub error: String,
    pub network_mode: String,
    /// By the name of the network.
    pub addresses: BTreeMap<String, IpAddr>,
    /// Host address and port by the container's TCP port.
    pub published: BTreeMap<u16, (String, u16)>,
    /// The engine's words for its health checks: when, exit code, output.
    pub health: Vec<(String, i64, String)>,
}

impl Container {
    /// Whether it is what its labels say; see [`labels::are_genuine`](super::labels::are_genuine).
    pub(super) fn is_genuine(&self) -> bool {
        super::labels::are_genuine(&self.labels, &self.name, &self.image)
    }

    pub(super) fn inspected(answer: ContainerInspectResponse) -> Self {
        let config = answer.config.unwrap_or_default();
        let state = answer.state.unwrap_or_default();
        let host = answer.host_config.unwrap_or_default();
        let network = answer.network_settings.unwrap_or_default();
        let status = match state.status {
            Some(Word::PAUSED) => Status::Paused,
            Some(Word::RUNNING | Word::RESTARTING | Word::STOPPING) => Status::Running,
            Some(Word::CREATED | Word::EMPTY) | None => Status::Created,
            Some(Word::EXITED | Word::DEAD | Word::REMOVING) => Status::Ended,
        };
        let mut published = bindings(network.ports);
        if published.is_empty() {
            // A stopped container has none now, and gets these again when it is started.
            published = bindings(host.port_bindings.clone());
        }
        let health = state.health.and_then(|h| h.log).unwrap_or_default();
        Self {
            key: answer.id.unwrap_or_default(),
            name: bare(answer.name.as_deref()),
            labels: config.labels.unwrap_or_default(),
            status,
            image: config.image.unwrap_or_default(),
            image_id: answer.image.unwrap_or_default(),
            entrypoint: config.entrypoint.unwrap_or_default(),
            command: config.cmd.unwrap_or_default(),
            env: config.env.unwrap_or_default().iter().map(|pair| split(pair)).collect(),
            limits: limits(&host),
            created_at: answer.created.as_deref().and_then(instant),
            started_at: state.started_at.as_deref().and_then(instant),
            finished_at: state.finished_at.as_deref().and_then(instant),
            exit_code: state.exit_code.and_then(|code| i32::try_from(code).ok()),
            out_of_memory: state.oom_killed.unwrap_or(false),
            error: state.error.unwrap_or_default(),
            network_mode: host.network_mode.unwrap_or_default(),
            addresses: addresses(network.networks),
            published,
            health: health
                .into_iter()
                .map(|h| {
                    (
                        h.start.unwrap_or_default(),
                        h.exit_code.unwrap_or_default(),
                        h.output.unwrap_or_default(),
                    )
                })
                .collect(),
        }
    }

    /// A list does not tell the command, the environment, the limits and when it started or ended.
    pub(super) fn listed(answer: ContainerSummary) -> Self {
        let status = match answer.state {
            Some(ContainerSummaryStateEnum::PAUSED) => Status::Paused,
            Some(
                ContainerSummaryStateEnum::RUNNING
                | ContainerSummaryStateEnum::RESTARTING
                | ContainerSummaryStateEnum::STOPPING,
            ) => Status::Running,
            Some(ContainerSummaryStateEnum::CREATED | ContainerSummaryStateEnum::EMPTY) | None => {
                Status::Created
            }
            Some(
                ContainerSummaryStateEnum::EXITED
                | ContainerSummaryStateEnum::DEAD
                | ContainerSummaryStateEnum::REMOVING,
            ) => Status::Ended,
        };
        let published =
            answer.ports.unwrap_or_default().into_iter().filter_map(|port| {
                Some((port.private_port, (port.ip.unwrap_or_default(), port.public_port?)))
            });
        Self {
            key: answer.id.unwrap_or_default(),
            name: bare(answer.names.and_then(|names| names.into_iter().next()).as_deref()),
            labels: answer.labels.unwrap_or_default(),
            status,
            image: answer.image.unwrap_or_default(),
            image_id: answer.image_id.unwrap_or_default(),
            entrypoint: Vec::new(),
            command: Vec::new(),
            env: Vec::new(),
            limits: Limits::default(),
            created_at: answer.created.and_then(|s| Timestamp::from_millis(s.saturating_mul(1000))),
            started_at: None,
            finished_at: None,
            exit_code: answer.status.as_deref().and_then(exit_code),
            out_of_memory: false,
            error: String::new(),
            network_mode: answer.host_config.and_then(|h| h.network_mode).unwrap_or_default(),
            addresses: addresses(answer.network_settings.and_then(|n| n.networks)),
            published: published.collect(),
            health: Vec::new(),
        }
    }

    /// Whether a list shows it as this earlier inspect did, so that asking again would tell nothing new.
    pub(super) fn is_as(&self, listed: &Self) -> bool {
        self.status == listed.status && (self.status != Status::Ended || self.exit_code == listed.exit_code)
    }

    /// Takes from a list what may have changed without a change of status.
    pub(super) fn refresh(&mut self, listed: &Self) {
        self.addresses.clone_from(&listed.addresses);
        if !listed.published.is_empty() {
            self.published.clone_from(&listed.published);
        }
    }

    /// The container whose network it uses.
    pub(super) fn joined(&self) -> Option<&str> {
        self.network_mode.strip_prefix("container:")
    }

    /// Its address in the network of that name, or in the first one where it has any.
    pub(super) fn address(&self, preferred: &str) -> Option<IpAddr> {
        let of = |name: &str| self.addresses.get(name).copied();
        of(preferred).or_else(|| of("bridge")).or_else(|| self.addresses.values().next().copied())
    }
}

fn bare(name: Option<&str>) -> String {
    name.unwrap_or_default().trim_start_matches('/').to_owned()
}

fn split(pair: &str) -> (String, String) {
    let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
    (key.to_owned(), value.to_owned())
}

fn limits(host: &HostConfig) -> Limits {
    let above_zero = |n: Option<i64>| n.and_then(|n| u64::try_from(n).ok()).filter(|n| *n > 0);
    Limits {
        cpu_millis: above_zero(host.nano_cpus).map(|nanos| nanos / 1_000_000).filter(|n| *n > 0),
        memory_bytes: above_zero(host.memory),
        pids: above_zero(host.pids_limit),
        ..Limits::default()
    }
}

fn addresses(networks: Option<HashMap<String, EndpointSettings>>) -> BTreeMap<String, IpAddr> {
    let address = |endpoint: &EndpointSettings| endpoint.ip_address.as_deref()?.parse().ok();
    networks
        .unwrap_or_default()
        .into_iter()
        .filter_map(|(name, endpoint)| Some((name, address(&endpoint)?)))
        .collect()
}

fn bindings(ports: Option<PortMap>) -> BTreeMap<u16, (String, u16)> {
    let of = |(port, bound): (String, Option<Vec<bollard::models::PortBinding>>)| {
        let inside = port.strip_suffix("/tcp")?.parse().ok()?;
        let first = bound?.into_iter().next()?;
        let outside = first.host_port?.parse::<u16>().ok().filter(|port| *port != 0)?;
        Some((inside, (first.host_ip.unwrap_or_default(), outside)))
    };
    ports.unwrap_or_default().into_iter().filter_map(of).collect()
}

/// From `Exited (137) 5 minutes ago`.
fn exit_code(status: &str) -> Option<i32> {
    status.split_once('(')?.1.split_once(')')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exit_code_of_a_list_is_in_its_words() {
        assert_eq!(exit_code("Exited (137) 5 minutes ago"), Some(137));
        assert_eq!(exit_code("Up 5 minutes (Paused)"), None);
        assert_eq!(exit_code("Up 5 minutes"), None);
    }

    #[test]
    fn an_inspect_that_tells_nothing_is_no_panic() {
        let empty = Container::inspected(ContainerInspectResponse::default());
        assert_eq!((empty.status, empty.started_at, empty.address("bridge")), (Status::Created, None, None));
        let empty = Container::listed(ContainerSummary::default());
        assert_eq!((empty.status, empty.joined()), (Status::Created, None));
    }

    #[test]
    fn the_address_is_that_of_the_configured_network_if_there_is_one() {
        let mut container = Container::listed(ContainerSummary::default());
        let [a, b, c]: [IpAddr; 3] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]].map(Into::into);
        container.addresses = BTreeMap::from([("a".into(), a), ("bridge".into(), b), ("mine".into(), c)]);
        assert_eq!(container.address("mine"), Some(c));
        assert_eq!(container.address("other"), Some(b));
        container.addresses.remove("bridge");
        assert_eq!(container.address("other"), Some(a));
    }
}
