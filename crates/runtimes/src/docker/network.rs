//! Which network boxes are on, and what follows from it: published ports, the address, whether a sidecar is possible.

use std::{collections::HashMap, net::Ipv4Addr};

use bollard::models::{EndpointSettings, NetworkingConfig, PortBinding, PortMap};
use sandglass_sandbox::{ports::runtime::RuntimeError, spec::Spec};

use super::{
    DockerConfig, Published, Shared,
    agent::AGENT_PORT,
    errors::{Failure, failed, invalid},
    labels,
    ports::Reservation,
};

/// The port that many programs serve on; it has a host port of its own.
pub(super) const HTTP_PORT: u16 = 8080;
/// Where an egress sidecar is asked.
pub(super) const EGRESS_PORT: u16 = 18080;

/// The configured network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode<'a> {
    /// Boxes share the host's addresses and ports.
    Host,
    Bridge,
    Named(&'a str),
}

impl<'a> Mode<'a> {
    pub(super) fn of(config: &'a DockerConfig) -> Self {
        match config.network_mode.as_str() {
            "host" => Self::Host,
            "bridge" | "default" => Self::Bridge,
            name => Self::Named(name),
        }
    }

    /// As the engine wants it in a host configuration.
    pub(super) fn name(self) -> &'a str {
        match self {
            Self::Host => "host",
            Self::Bridge => "bridge",
            Self::Named(name) => name,
        }
    }

    /// The entry of a user-defined network, which engines want beside the mode.
    pub(super) fn endpoints(self) -> Option<NetworkingConfig> {
        let Self::Named(name) = self else { return None };
        let endpoints = HashMap::from([(name.to_owned(), EndpointSettings::default())]);
        Some(NetworkingConfig { endpoints_config: Some(endpoints) })
    }
}

/// Host ports that belong to a box from now on; dropped, they are free again.
pub(super) struct Taken<'a> {
    pub published: Published,
    pub extra: Vec<u16>,
    pub reservation: Reservation<'a>,
}

impl Shared {
    /// Refuses what the configured network cannot do.
    pub(super) async fn admit_network(&self, has_policy: bool) -> Result<(), RuntimeError> {
        let mode = Mode::of(&self.config);
        check_policy(mode, has_policy)?;
        let Mode::Named(name) = mode else { return Ok(()) };
        let safe = |c: char| c.is_ascii_alphanumeric() || "_.-".contains(c);
        if name.is_empty() || !name.chars().all(safe) {
            return Err(invalid(
                "network",
                format!("{name:?} is not a network name; see [docker] network_mode"),
            ));
        }
        let looked = self
            .client
            .call(|docker| async move {
                docker.inspect_network(name, None::<bollard::query_parameters::InspectNetworkOptions>).await
            })
            .await;
        match looked {
            Ok(_) => Ok(()),
            Err(e) if e.is_absent() => Err(absent_network(name)),
            // An engine that answers in a way we cannot read has the network.
            Err(Failure::Unreadable(_)) => Ok(()),
            Err(e) => Err(e.during("network")),
        }
    }

    /// Refuses boxes that only the server may reach where others could reach them too, or the server could not.
    pub(super) fn admit_secure_access(&self) -> Result<(), RuntimeError> {
        if Mode::of(&self.config) == Mode::Host {
            let message = "secureAccess needs [docker] network_mode = \"bridge\": on the host's network every port is open";
            return Err(invalid("network", message));
        }
        if !self.config.engine.is_local() {
            let message = "secureAccess needs an engine on this machine: ports of another one are open to everybody \
                           who reaches it";
            return Err(invalid("network", message));
        }
        Ok(())
    }

    /// The address of the host that the ports of a box are published on; `None`: nowhere, because only this server may reach them and it
    /// needs no ports of the host for that.
    pub(super) fn publish_host(&self, spec: &Spec) -> Option<Ipv4Addr> {
        if !spec.secure_access {
            return Some(self.config.publish_host);
        }
        let reaches = self.config.reaches_containers && self.config.engine.is_local();
        (!reaches).then_some(Ipv4Addr::LOCALHOST)
    }

    /// Takes host ports for the agent, port 8080, the sidecar when there is one, and `extra` more.
    pub(super) async fn publish(
        &self,
        id: sandglass_sandbox::SandboxId,
        with_egress: bool,
        extra: usize,
    ) -> Result<Taken<'_>, RuntimeError> {
        self.seed_ports().await?;
        let wanted = 2 + usize::from(with_egress) + extra;
        let reservation = match self.ports.reserve(id, wanted) {
            Ok(reservation) => reservation,
            Err(full) => {
                // Boxes may have gone behind our back; their ports come back only by looking.
                self.read_ports().await?;
                self.ports.reserve(id, wanted).map_err(|_| full)?
            }
        };
        let mut ports = reservation.ports().iter().copied();
        let (Some(agent), Some(http)) = (ports.next(), ports.next()) else {
            return Err(failed("ports", "the allocator gave fewer ports than asked for"));
        };
        let egress = if with_egress { ports.next() } else { None };
        let extra = ports.collect();
        Ok(Taken { published: Published { agent, http, egress }, extra, reservation })
    }

    async fn seed_ports(&self) -> Result<(), RuntimeError> {
        self.ports.seeded().get_or_try_init(|| self.read_ports()).await.copied()
    }

    /// Reads which ports existing boxes hold, running or not: stopped ones are named only by their labels.
    pub(super) async fn read_ports(&self) -> Result<(), RuntimeError> {
        let listed = self.containers_with(labels::ID).await.map_err(|e| e.during("ports"))?;
        let held = listed.iter().flat_map(|container| {
            let owner = container.labels.get(labels::ID).and_then(|id| id.parse().ok());
            let named = [labels::AGENT_PORT, labels::HTTP_PORT]
                .into_iter()
                .filter_map(|name| container.labels.get(name).and_then(|port| port.parse().ok()));
            let bound = container.published.values().map(|(_, port)| *port);
            named.chain(bound).filter_map(move |port: u16| Some((port, owner?)))
        });
        let making = self.making().clone();
        self.ports.reseed(held, &making);
        Ok(())
    }
}

fn check_policy(mode: Mode<'_>, has_policy: bool) -> Result<(), RuntimeError> {
    if has_policy && mode != Mode::Bridge {
        let message =
            format!("a network policy needs [docker] network_mode = \"bridge\", not {:?}", mode.name());
        return Err(invalid("network", message));
    }
    Ok(())
}

pub(super) fn absent_network(name: &str) -> RuntimeError {
    invalid("network", format!("the engine has no network {name:?}; see [docker] network_mode"))
}

/// What a container publishes: container ports with the host's for each, and the list of the former.
pub(super) fn bindings(pairs: &[(&str, u16)], host_ip: &str) -> (PortMap, Vec<String>) {
    let bound = pairs.iter().map(|(port, host_port)| {
        let binding =
            PortBinding { host_ip: Some(host_ip.to_owned()), host_port: Some(host_port.to_string()) };
        ((*port).to_owned(), Some(vec![binding]))
    });
    (bound.collect(), pairs.iter().map(|(port, _)| (*port).to_owned()).collect())
}

/// The published ports of a box as pairs of the container's and the host's.
pub(super) fn pairs(published: Published) -> Vec<(String, u16)> {
    let mut pairs =
        vec![(format!("{AGENT_PORT}/tcp"), published.agent), (format!("{HTTP_PORT}/tcp"), published.http)];
    pairs.extend(published.egress.map(|port| (format!("{EGRESS_PORT}/tcp"), port)));
    pairs
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::ports::RuntimeErrorKind;

    use super::*;

    #[test]
    fn only_a_bridge_can_hold_a_sidecar() {
        assert!(check_policy(Mode::Bridge, true).is_ok());
        for mode in [Mode::Host, Mode::Named("mine")] {
            assert!(check_policy(mode, false).is_ok());
            let refused = check_policy(mode, true).unwrap_err();
            assert_eq!((refused.kind, refused.phase.as_str()), (RuntimeErrorKind::Invalid, "network"));
        }
    }

    #[test]
    fn ports_are_bound_where_they_are_published() {
        let (map, exposed) = bindings(&[("44772/tcp", 40001), ("8080/tcp", 40002)], "127.0.0.1");
        assert_eq!(exposed, ["44772/tcp", "8080/tcp"]);
        let binding = &map["8080/tcp"].as_ref().unwrap()[0];
        assert_eq!(
            (binding.host_ip.as_deref(), binding.host_port.as_deref()),
            (Some("127.0.0.1"), Some("40002"))
        );
    }

    #[test]
    fn a_user_defined_network_is_named_twice() {
        assert!(Mode::Bridge.endpoints().is_none());
        assert!(Mode::Named("mine").endpoints().unwrap().endpoints_config.unwrap().contains_key("mine"));
    }
}
