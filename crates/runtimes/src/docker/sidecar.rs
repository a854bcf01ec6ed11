//! The egress sidecar: a container of its own that enforces a box's network policy and whose network the box joins.
//!
//! Owns its container and the volume both share. It publishes the box's ports, because the network is its own. Both are named after the
//! box, so that they are found without it.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use bollard::{
    models::{ContainerCreateBody, HostConfig},
    query_parameters::{CreateContainerOptions, RemoveContainerOptions, StartContainerOptions},
};
use sandglass_sandbox::{SandboxId, ports::runtime::RuntimeError, spec::Egress};

use super::{
    EgressConfig, Published, Shared,
    agent::HOME,
    errors::{Failure, failed},
    labels,
    network::{self, EGRESS_PORT},
    reach,
};

const EXTRA_CA: &str = "/etc/ssl/certs/opensandbox-upstream-extra-ca.pem";
/// The box's own environment says so too, when secrets are injected.
pub(super) const TRANSPARENT: &str = "OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT";
const NO_IPV6: [&str; 3] =
    ["net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.default.disable_ipv6", "net.ipv6.conf.lo.disable_ipv6"];
/// One question whether it is ready, and the pause between two.
const QUESTION: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);

pub(super) fn container_name(id: SandboxId) -> String {
    format!("sandbox-egress-{id}")
}

/// What the sidecar and its box share: the agent's directory.
pub(super) fn runtime_volume(id: SandboxId) -> String {
    format!("opensandbox-runtime-{id}")
}

/// Asked for by everybody who talks to the sidecar. Never printed.
pub(super) struct Token(pub String);

impl Token {
    pub(super) fn random() -> Self {
        Self(uuid::Uuid::new_v4().simple().to_string())
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(***)")
    }
}

impl Shared {
    /// Makes and starts the sidecar of a box and returns its container's id once it enforces. On failure the caller removes it.
    pub(super) async fn start_sidecar(
        &self,
        id: SandboxId,
        egress: &Egress,
        published: Published,
        token: &Token,
    ) -> Result<String, RuntimeError> {
        self.create_volume(&runtime_volume(id), Some(id), None).await?;
        self.remove_container(&container_name(id)).await?;
        let body = self.sidecar_body(id, egress, published, token)?;
        let plain = without_sysctls(&body);
        let container = match self.run_sidecar(id, body).await {
            // Engines without IPv6, and some kernels, refuse to switch it off.
            Err(Failure::Refused { message, .. }) if plain.is_some() && is_about_sysctls(&message) => {
                self.remove_container(&container_name(id)).await?;
                let body = plain.unwrap_or_default();
                self.run_sidecar(id, body).await.map_err(|e| e.during("sidecar"))?
            }
            other => other.map_err(|e| e.during("sidecar"))?,
        };
        self.until_it_enforces(id, published, token).await?;
        Ok(container)
    }

    fn sidecar_body(
        &self,
        id: SandboxId,
        egress: &Egress,
        published: Published,
        token: &Token,
    ) -> Result<ContainerCreateBody, RuntimeError> {
        let config = &self.config.egress;
        let env = environment(config, id, egress, token)
            .map_err(|e| failed("sidecar", format!("cannot write the policy: {e}")))?;
        let pairs = network::pairs(published);
        let pairs: Vec<(&str, u16)> = pairs.iter().map(|(port, host)| (port.as_str(), *host)).collect();
        let (bindings, exposed) = network::bindings(&pairs, &self.config.publish_host.to_string());
        let ca = config.upstream_proxy.as_ref().and_then(|proxy| proxy.ca_cert_path.as_deref());
        let mut binds = vec![format!("{}:{HOME}:rw", runtime_volume(id))];
        binds.extend(ca.map(|path: &Path| format!("{}:{EXTRA_CA}:ro", path.display())));
        let off = || NO_IPV6.map(|name| (name.to_owned(), "1".to_owned())).into_iter().collect();
        Ok(ContainerCreateBody {
            image: Some(self.egress_image()?.to_owned()),
            env: Some(env),
            exposed_ports: Some(exposed),
            labels: Some(HashMap::from([(labels::SIDECAR_FOR.to_owned(), id.to_string())])),
            host_config: Some(HostConfig {
                network_mode: Some("bridge".to_owned()),
                cap_add: Some(vec!["NET_ADMIN".to_owned()]),
                port_bindings: Some(bindings),
                binds: Some(binds),
                sysctls: config.disable_ipv6.then(off),
                ..HostConfig::default()
            }),
            ..ContainerCreateBody::default()
        })
    }

    async fn run_sidecar(&self, id: SandboxId, body: ContainerCreateBody) -> Result<String, Failure> {
        let options =
            CreateContainerOptions { name: Some(container_name(id)), ..CreateContainerOptions::default() };
        let made = self.client.call(|d| async move { d.create_container(Some(options), body).await }).await?;
        let container = &made.id;
        self.client
            .call(|d| async move { d.start_container(container, None::<StartContainerOptions>).await })
            .await?;
        Ok(made.id)
    }

    async fn until_it_enforces(
        &self,
        id: SandboxId,
        published: Published,
        token: &Token,
    ) -> Result<(), RuntimeError> {
        let port = published.egress.unwrap_or(EGRESS_PORT);
        let address = self.published_address(port).await?;
        let headers = [("OPENSANDBOX-EGRESS-AUTH", token.0.as_str())];
        let mut last = String::new();
        let asked = async {
            loop {
                match reach::ask(address, "/healthz", &headers, QUESTION).await {
                    Ok(200..=299) => return,
                    Ok(status) => last = format!("it answers with status {status}"),
                    Err(e) => last = e.to_string(),
                }
                tokio::time::sleep(PAUSE).await;
            }
        };
        let patience = self.config.egress.readiness_timeout;
        if tokio::time::timeout(patience, asked).await.is_ok() {
            return Ok(());
        }
        tracing::warn!(sandbox = %id, %address, last, "the egress sidecar is not ready");
        let message = format!("the egress sidecar was not ready within {} s: {last}", patience.as_secs_f32());
        Err(failed("sidecar", message))
    }

    /// Where a published port is reached from this process.
    pub(super) async fn published_address(&self, port: u16) -> Result<SocketAddr, RuntimeError> {
        let host = match self.config.engine.remote_host() {
            Some(host) => host.to_owned(),
            None => local_host(&self.config, is_in_container()),
        };
        let found = tokio::net::lookup_host((host.as_str(), port)).await;
        let first = found.ok().and_then(|mut addresses| addresses.next());
        first.ok_or_else(|| failed("network", format!("the host of published ports, {host}, has no address")))
    }

    /// Removes a container of any kind, running or not. Absent is success.
    pub(super) async fn remove_container(&self, name: &str) -> Result<(), RuntimeError> {
        let options = RemoveContainerOptions { force: true, v: true, ..RemoveContainerOptions::default() };
        match self.client.call(|d| async move { d.remove_container(name, Some(options)).await }).await {
            Ok(()) => Ok(()),
            Err(e) if e.is_absent() => Ok(()),
            // Somebody else is removing it right now.
            Err(Failure::Refused { status: 409, message }) if message.contains("already in progress") => {
                Ok(())
            }
            Err(e) => Err(e.during("remove")),
        }
    }
}

/// How this machine's published ports are spelled by a process on it.
fn local_host(config: &super::DockerConfig, in_container: bool) -> String {
    if let Some(host) = config.host_ip.as_ref().filter(|host| in_container && !host.is_empty()) {
        return host.clone();
    }
    let everywhere = config.publish_host.is_unspecified();
    if everywhere { "127.0.0.1".to_owned() } else { IpAddr::V4(config.publish_host).to_string() }
}

fn is_in_container() -> bool {
    const KINDS: [&str; 7] =
        ["podman", "docker", "oci", "lxc", "lxc-libvirt", "systemd-nspawn", "containerd"];
    let told = |name: &str| std::env::var(name).is_ok_and(|kind| KINDS.contains(&kind.as_str()));
    ["/.dockerenv", "/run/.containerenv"].iter().any(|path| Path::new(path).exists())
        || ["container", "CONTAINER"].into_iter().any(told)
}

fn environment(
    config: &EgressConfig,
    id: SandboxId,
    egress: &Egress,
    token: &Token,
) -> serde_json::Result<Vec<String>> {
    let mut env: Vec<(&str, String)> = vec![
        ("OPENSANDBOX_EGRESS_RULES", serde_json::to_string(&egress.policy)?),
        ("OPENSANDBOX_EGRESS_MODE", config.mode.clone()),
        ("OPENSANDBOX_EGRESS_TOKEN", token.0.clone()),
        ("OPENSANDBOX_EGRESS_SANDBOX_ID", id.to_string()),
    ];
    env.extend(config.otlp_endpoint.iter().map(|url| ("OTEL_EXPORTER_OTLP_ENDPOINT", url.clone())));
    if let Some(proxy) = &config.upstream_proxy {
        env.push(("OPENSANDBOX_EGRESS_UPSTREAM_PROXY", proxy.url.clone()));
        let login = proxy.authorization.iter();
        env.extend(login.map(|value| ("OPENSANDBOX_EGRESS_UPSTREAM_PROXY_AUTH", value.clone())));
        if proxy.ca_cert_path.is_some() {
            env.push(("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_EXTRA_CA", EXTRA_CA.to_owned()));
        }
    }
    if egress.credential_proxy {
        env.push((TRANSPARENT, "true".to_owned()));
    }
    let mut pairs: Vec<String> = env.iter().map(|(name, value)| format!("{name}={value}")).collect();
    // The caller adds, and never replaces what decides about the policy.
    let asked = egress.env.iter().filter(|(name, _)| env.iter().all(|(ours, _)| ours != name));
    pairs.extend(asked.map(|(name, value)| format!("{name}={value}")));
    Ok(pairs)
}

/// The same container without kernel settings; `None` when it has none.
fn without_sysctls(body: &ContainerCreateBody) -> Option<ContainerCreateBody> {
    let host = body.host_config.as_ref().filter(|host| host.sysctls.is_some())?;
    let host = HostConfig { sysctls: None, ..host.clone() };
    Some(ContainerCreateBody { host_config: Some(host), ..body.clone() })
}

fn is_about_sysctls(message: &str) -> bool {
    message.contains("sysctl") || message.contains("disable_ipv6")
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use sandglass_sandbox::spec::{EgressRule, NetworkPolicy};

    use super::{super::DockerConfig, super::UpstreamProxy, super::host_config::tests::config, *};

    fn egress(env: &[(&str, &str)], credential_proxy: bool) -> Egress {
        let rule = EgressRule { action: "allow".into(), target: "example.com".into() };
        Egress {
            policy: NetworkPolicy { default_action: Some("deny".into()), egress: vec![rule] },
            credential_proxy,
            env: env.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
        }
    }

    #[test]
    fn the_sidecar_is_told_the_policy_and_its_token() {
        let id = SandboxId::random();
        let asked = egress(&[("A", "b"), ("OPENSANDBOX_EGRESS_MODE", "off"), (TRANSPARENT, "false")], true);
        let env = environment(&config().egress, id, &asked, &Token("t".into())).unwrap();
        assert_eq!(
            env,
            [
                r#"OPENSANDBOX_EGRESS_RULES={"defaultAction":"deny","egress":[{"action":"allow","target":"example.com"}]}"#,
                "OPENSANDBOX_EGRESS_MODE=dns",
                "OPENSANDBOX_EGRESS_TOKEN=t",
                &format!("OPENSANDBOX_EGRESS_SANDBOX_ID={id}"),
                "OPENSANDBOX_EGRESS_MITMPROXY_TRANSPARENT=true",
                "A=b",
            ]
        );
        let empty = Egress { policy: NetworkPolicy::default(), ..egress(&[], false) };
        let env = environment(&config().egress, id, &empty, &Token("t".into())).unwrap();
        assert_eq!(env[0], r#"OPENSANDBOX_EGRESS_RULES={"egress":[]}"#);
    }

    #[test]
    fn an_upstream_proxy_is_passed_on() {
        let proxy = UpstreamProxy {
            url: "http://proxy:3128".into(),
            authorization: Some("Basic x".into()),
            ca_cert_path: Some("/ca.pem".into()),
        };
        assert!(!format!("{proxy:?}").contains("Basic"));
        let config = EgressConfig {
            upstream_proxy: Some(proxy),
            otlp_endpoint: Some("http://otel".into()),
            ..config().egress
        };
        let env = environment(&config, SandboxId::random(), &egress(&[], false), &Token("t".into())).unwrap();
        for expected in [
            "OTEL_EXPORTER_OTLP_ENDPOINT=http://otel",
            "OPENSANDBOX_EGRESS_UPSTREAM_PROXY=http://proxy:3128",
            "OPENSANDBOX_EGRESS_UPSTREAM_PROXY_AUTH=Basic x",
            &format!("OPENSANDBOX_EGRESS_MITMPROXY_UPSTREAM_EXTRA_CA={EXTRA_CA}"),
        ] {
            assert!(env.iter().any(|pair| pair == expected), "{expected}");
        }
    }

    #[test]
    fn published_ports_are_spelled_for_a_process_on_this_machine() {
        let table = [
            (None, Ipv4Addr::UNSPECIFIED, false, "127.0.0.1"),
            (Some("10.0.0.1"), Ipv4Addr::UNSPECIFIED, false, "127.0.0.1"),
            (Some("10.0.0.1"), Ipv4Addr::UNSPECIFIED, true, "10.0.0.1"),
            (None, Ipv4Addr::new(192, 0, 2, 7), true, "192.0.2.7"),
        ];
        for (host_ip, publish_host, in_container, expected) in table {
            let config = DockerConfig { host_ip: host_ip.map(str::to_owned), publish_host, ..config() };
            assert_eq!(local_host(&config, in_container), expected);
        }
    }
}
