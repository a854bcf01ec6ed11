//! The egress sidecar: a container of its own that enforces a box's network policy and whose network the box joins.
//!
//! Owns its container and the volume both share. It publishes the box's ports, because the network is its own. Both are named after the
//! box, so that they are found without it.

use std::{
    collections::HashMap,
    fmt,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::Path,
    time::Duration,
};

use bollard::{
    models::{ContainerCreateBody, HostConfig, SystemInfo},
    query_parameters::{
        CreateContainerOptions, InspectNetworkOptions, RemoveContainerOptions, StartContainerOptions,
    },
};
use sandglass_sandbox::{SandboxId, ports::runtime::RuntimeError, spec::Egress};

use crate::enforcement::{self, Decided};

use super::{
    EgressConfig, Published, Shared,
    agent::HOME,
    container::Status,
    enforcer::{ALWAYS, Enforcer},
    errors::{Failure, failed},
    labels,
    network::{self, EGRESS_PORT},
    reach,
};

const EXTRA_CA: &str = "/etc/ssl/certs/opensandbox-upstream-extra-ca.pem";
const POLICY_FILE: &str = "OPENSANDBOX_EGRESS_POLICY_FILE";
const TRUSTED_PEERS: &str = "OPENSANDBOX_EGRESS_CREDENTIAL_VAULT_TRUSTED_PROXY_CIDRS";
const NO_IPV6: [&str; 3] =
    ["net.ipv6.conf.all.disable_ipv6", "net.ipv6.conf.default.disable_ipv6", "net.ipv6.conf.lo.disable_ipv6"];
/// One question whether it is ready, and the pause between two.
const QUESTION: Duration = Duration::from_secs(1);
const PAUSE: Duration = Duration::from_millis(20);
/// Questions between two looks whether it still runs.
const QUESTIONS: u32 = 25;
/// What our enforcer may use when the operator sets no limits.
const MEMORY: u64 = 256 << 20;
const PIDS: i64 = 128;
/// The one place that our enforcer may write to, beside the volume.
const SCRATCH: [&str; 2] = ["/run", "/tmp"];

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

/// What one sidecar is made from.
#[derive(Debug, Clone, Copy)]
pub(super) struct Wanted<'a> {
    pub id: SandboxId,
    pub egress: &'a Egress,
    /// `None`: its ports lead nowhere.
    pub published: Option<Published>,
    /// Where they are published.
    pub host: Ipv4Addr,
    pub token: &'a Token,
}

impl Shared {
    /// Makes and starts the sidecar of a box and returns its container's id once it enforces. On failure the caller removes it.
    pub(super) async fn start_sidecar(&self, wanted: Wanted<'_>) -> Result<String, RuntimeError> {
        let name = container_name(wanted.id);
        self.create_volume(&runtime_volume(wanted.id), Some(wanted.id), None).await?;
        self.remove_container(&name).await?;
        let (image, gateway) = match self.enforcer() {
            Enforcer::Configured(image) => (image.to_owned(), None),
            Enforcer::Own => (self.own_image_name().await?, self.gateway().await),
        };
        let mut body = self.sidecar_body(wanted, image, gateway)?;
        let mut made_again = false;
        let container = loop {
            let failure = match self.run_sidecar(&name, body.clone()).await {
                Ok(container) => break container,
                Err(failure) => failure,
            };
            let Failure::Refused { status, message } = &failure else {
                return Err(failure.during("sidecar"));
            };
            if let Some(plain) = without_sysctls(&body).filter(|_| is_about_sysctls(message)) {
                // Engines without IPv6, and some kernels, refuse to switch it off.
                body = plain;
            } else if *status == 404 && self.enforcer() == Enforcer::Own && !made_again {
                // Somebody pruned the image a moment ago.
                made_again = true;
                self.make_own_image().await?;
            } else {
                return Err(failure.during("sidecar"));
            }
            self.remove_container(&name).await?;
        };
        self.until_it_enforces(wanted, &container).await?;
        Ok(container)
    }

    fn sidecar_body(
        &self,
        wanted: Wanted<'_>,
        image: String,
        gateway: Option<IpAddr>,
    ) -> Result<ContainerCreateBody, RuntimeError> {
        let config = &self.config.egress;
        let mut env = environment(config, wanted.id, wanted.egress, wanted.token)
            .map_err(|e| failed("sidecar", format!("cannot write the policy: {e}")))?;
        let pairs = wanted.published.map(network::pairs).unwrap_or_default();
        let pairs: Vec<(&str, u16)> = pairs.iter().map(|(port, host)| (port.as_str(), *host)).collect();
        let (bindings, exposed) = network::bindings(&pairs, &wanted.host.to_string());
        let ca = config.upstream_proxy.as_ref().and_then(|proxy| proxy.ca_cert_path.as_deref());
        let mut binds = vec![format!("{}:{HOME}:rw", runtime_volume(wanted.id))];
        binds.extend(ca.map(|path: &Path| format!("{}:{EXTRA_CA}:ro", path.display())));
        let own = self.enforcer() == Enforcer::Own;
        if own && self.config.engine.is_local() && Path::new(ALWAYS).is_dir() {
            binds.push(format!("{ALWAYS}:{ALWAYS}:ro"));
        }
        let off = || NO_IPV6.map(|name| (name.to_owned(), "1".to_owned())).into_iter().collect();
        let mut host = HostConfig {
            network_mode: Some("bridge".to_owned()),
            cap_add: Some(vec!["NET_ADMIN".to_owned()]),
            port_bindings: Some(bindings),
            binds: Some(binds),
            sysctls: config.disable_ipv6.then(off),
            ..HostConfig::default()
        };
        limit(&mut host, config);
        if own {
            confine(&mut host);
            adapt(&mut env, gateway);
        }
        Ok(ContainerCreateBody {
            image: Some(image),
            env: Some(env),
            exposed_ports: Some(exposed).filter(|ports| !ports.is_empty()),
            labels: Some(HashMap::from([(labels::SIDECAR_FOR.to_owned(), wanted.id.to_string())])),
            host_config: Some(host),
            ..ContainerCreateBody::default()
        })
    }

    /// The address that connections from the engine's host come from; none where others come from it too.
    async fn gateway(&self) -> Option<IpAddr> {
        let info = self.client.call(|docker| async move { docker.info().await }).await.ok()?;
        if !keeps_sources_apart(&info) {
            return None;
        }
        let asked = self.client.call(|docker| async move {
            docker.inspect_network("bridge", None::<InspectNetworkOptions>).await
        });
        let ranges = asked.await.ok()?.ipam?.config?;
        ranges.into_iter().find_map(|range| range.gateway?.parse::<Ipv4Addr>().ok()).map(IpAddr::V4)
    }

    async fn run_sidecar(&self, name: &str, body: ContainerCreateBody) -> Result<String, Failure> {
        let options =
            CreateContainerOptions { name: Some(name.to_owned()), ..CreateContainerOptions::default() };
        let made = self.client.call(|d| async move { d.create_container(Some(options), body).await }).await?;
        let container = &made.id;
        self.client
            .call(|d| async move { d.start_container(container, None::<StartContainerOptions>).await })
            .await?;
        Ok(made.id)
    }

    async fn until_it_enforces(&self, wanted: Wanted<'_>, container: &str) -> Result<(), RuntimeError> {
        let address = match wanted.published {
            Some(published) => {
                self.published_address(wanted.host, published.egress.unwrap_or(EGRESS_PORT)).await?
            }
            None => self.own_address(container).await?,
        };
        let headers = [("OPENSANDBOX-EGRESS-AUTH", wanted.token.0.as_str())];
        let mut last = String::new();
        let asked = async {
            for question in 1.. {
                match reach::ask(address, "/healthz", &headers, QUESTION).await {
                    Ok(200..=299) => return Ok(()),
                    Ok(status) => last = format!("it answers with status {status}"),
                    Err(e) => last = e.to_string(),
                }
                if question % QUESTIONS == 0 && self.has_ended(container).await {
                    break;
                }
                tokio::time::sleep(PAUSE).await;
            }
            Err("ended")
        };
        let patience = self.config.egress.readiness_timeout;
        let outcome = match tokio::time::timeout(patience, asked).await {
            Ok(Ok(())) => return Ok(()),
            Ok(Err(ended)) => ended.to_owned(),
            Err(_) => format!("was not ready within {} s: {last}", patience.as_secs_f32()),
        };
        // What somebody else's program says may be anything.
        let own = self.enforcer() == Enforcer::Own;
        let words = if own { self.last_words_of(container).await.unwrap_or_default() } else { Vec::new() };
        let said = words.last().map(|line| format!("; it said: {line}")).unwrap_or_default();
        tracing::warn!(sandbox = %wanted.id, %address, outcome, said, "the egress sidecar is not ready");
        Err(failed("sidecar", format!("the egress sidecar {outcome}{said}")))
    }

    async fn has_ended(&self, container: &str) -> bool {
        let seen = self.inspect_container(container).await;
        matches!(seen, Ok(None)) || matches!(seen, Ok(Some(seen)) if seen.status == Status::Ended)
    }

    /// Where the sidecar's control is reached whose ports are not published.
    async fn own_address(&self, container: &str) -> Result<SocketAddr, RuntimeError> {
        let seen = self.inspect_container(container).await.map_err(|e| e.during("sidecar"))?;
        let address = seen.and_then(|seen| seen.address("bridge"));
        let address = address.ok_or_else(|| failed("sidecar", "the egress sidecar has no address"))?;
        Ok(SocketAddr::new(address, EGRESS_PORT))
    }

    /// Where a published port is reached from this process.
    pub(super) async fn published_address(
        &self,
        published_on: Ipv4Addr,
        port: u16,
    ) -> Result<SocketAddr, RuntimeError> {
        let host = match self.config.engine.remote_host() {
            Some(host) => host.to_owned(),
            None => local_host(self.config.host_ip.as_deref().filter(|_| is_in_container()), published_on),
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

/// Whether a published port is reached from the bridge's gateway by the engine's host alone. A program of a rootless engine,
/// and that of an engine in a virtual machine, passes on whatever comes from anywhere as if it came from there.
fn keeps_sources_apart(info: &SystemInfo) -> bool {
    let rootless = info
        .security_options
        .iter()
        .flatten()
        .any(|option| option.split(',').any(|part| part == "rootless" || part == "name=rootless"));
    let system = info.operating_system.as_deref().unwrap_or_default();
    let is_linux = info.os_type.as_deref() == Some("linux");
    is_linux && !rootless && !system.contains("Desktop")
}

/// How this machine's published ports are spelled by a process on it, or, when it is told how, by one in a container.
fn local_host(told: Option<&str>, published_on: Ipv4Addr) -> String {
    match told.filter(|host| !host.is_empty()) {
        Some(host) => host.to_owned(),
        None if published_on.is_unspecified() => "127.0.0.1".to_owned(),
        None => published_on.to_string(),
    }
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
    let decided = Decided {
        mode: &config.mode,
        token: &token.0,
        otlp_endpoint: config.otlp_endpoint.as_deref(),
        upstream_proxy: config.upstream_proxy.as_ref(),
        proxy_authority: EXTRA_CA,
    };
    let env = enforcement::environment(id, egress, decided, Vec::new())?;
    Ok(env.iter().map(|(name, value)| format!("{name}={value}")).collect())
}

/// What the operator lets a sidecar use.
fn limit(host: &mut HostConfig, config: &EgressConfig) {
    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    host.memory = config.limits.memory_bytes.map(signed);
    host.memory_swap = host.memory;
    host.nano_cpus = config.limits.cpu_millis.map(|millis| signed(millis.saturating_mul(1_000_000)));
    host.pids_limit = config.limits.pids.map(signed);
}

/// Takes everything from our own enforcer that it can do without. It speaks to whatever the box speaks to.
fn confine(host: &mut HostConfig) {
    host.cap_drop = Some(vec!["ALL".to_owned()]);
    host.security_opt = Some(vec!["no-new-privileges=true".to_owned()]);
    host.readonly_rootfs = Some(true);
    let scratch = SCRATCH.map(|path| (path.to_owned(), "rw,noexec,nosuid,nodev,size=8m".to_owned()));
    host.tmpfs = Some(scratch.into_iter().collect());
    // It is the first process itself, whatever the engine's default is.
    host.init = Some(false);
    host.memory.get_or_insert(MEMORY.cast_signed());
    host.memory_swap = host.memory;
    host.pids_limit.get_or_insert(PIDS);
}

/// What is different for our own enforcer. It keeps its policy itself: a file would have to lie where the box can write.
fn adapt(env: &mut Vec<String>, gateway: Option<IpAddr>) {
    env.retain(|pair| !pair.starts_with(&format!("{POLICY_FILE}=")));
    env.push("SANDGLASS_EGRESS_PLACEMENT=shared".to_owned());
    env.push(format!("SANDGLASS_EGRESS_CA_DIR={HOME}"));
    let Some(gateway) = gateway else { return };
    // Secrets come from this machine in the clear, by way of the published port or of this server, and from nowhere else.
    let name = format!("{TRUSTED_PEERS}=");
    match env.iter_mut().find(|pair| pair.starts_with(&name)) {
        Some(asked) if asked.len() > name.len() => asked.push_str(&format!(",{gateway}/32")),
        Some(asked) => asked.push_str(&format!("{gateway}/32")),
        None => env.push(format!("{name}{gateway}/32")),
    }
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
    use sandglass_sandbox::spec::{EgressRule, Limits, NetworkPolicy};

    use super::{super::host_config::tests::config, *};
    use crate::enforcement::{TRANSPARENT, UpstreamProxy};

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
    fn our_own_enforcer_has_only_what_it_needs() {
        let mut host = HostConfig { cap_add: Some(vec!["NET_ADMIN".to_owned()]), ..HostConfig::default() };
        limit(&mut host, &config().egress);
        assert_eq!((host.memory, host.pids_limit), (None, None));
        confine(&mut host);
        assert_eq!(host.cap_drop, Some(vec!["ALL".to_owned()]));
        assert_eq!((host.memory, host.memory_swap), (Some(256 << 20), Some(256 << 20)));
        assert_eq!((host.readonly_rootfs, host.init, host.pids_limit), (Some(true), Some(false), Some(PIDS)));
        let limits = Limits { memory_bytes: Some(64 << 20), cpu_millis: Some(500), ..Limits::default() };
        limit(&mut host, &EgressConfig { limits, ..config().egress });
        confine(&mut host);
        assert_eq!((host.memory, host.nano_cpus), (Some(64 << 20), Some(500_000_000)));
    }

    #[test]
    fn our_own_enforcer_keeps_its_policy_and_trusts_this_machine() {
        let mut env = vec!["A=b".to_owned(), format!("{POLICY_FILE}=/opt/opensandbox/policy.json")];
        adapt(&mut env, None);
        assert_eq!(
            env,
            ["A=b", "SANDGLASS_EGRESS_PLACEMENT=shared", "SANDGLASS_EGRESS_CA_DIR=/opt/opensandbox"]
        );
        for (asked, expected) in [
            (None, "172.17.0.1/32"),
            (Some(""), "172.17.0.1/32"),
            (Some("192.0.2.0/24"), "192.0.2.0/24,172.17.0.1/32"),
        ] {
            let mut env: Vec<_> = asked.map(|asked| format!("{TRUSTED_PEERS}={asked}")).into_iter().collect();
            adapt(&mut env, Some([172, 17, 0, 1].into()));
            assert!(env.contains(&format!("{TRUSTED_PEERS}={expected}")), "{env:?}");
        }
    }

    #[test]
    fn the_gateway_is_trusted_only_where_nobody_else_comes_from_it() {
        let engine = |os: &str, system: &str, options: &[&str]| SystemInfo {
            os_type: Some(os.to_owned()),
            operating_system: Some(system.to_owned()),
            security_options: Some(options.iter().map(|option| (*option).to_owned()).collect()),
            ..SystemInfo::default()
        };
        let plain = ["name=seccomp,profile=builtin", "name=cgroupns"];
        assert!(keeps_sources_apart(&engine("linux", "Debian GNU/Linux 13 (trixie)", &plain)));
        assert!(!keeps_sources_apart(&engine(
            "linux",
            "Debian GNU/Linux 13 (trixie)",
            &["name=rootless", plain[0]]
        )));
        assert!(!keeps_sources_apart(&engine("linux", "Docker Desktop", &plain)));
        assert!(!keeps_sources_apart(&engine("windows", "Windows Server 2022", &[])));
        assert!(!keeps_sources_apart(&SystemInfo::default()), "an engine that does not say");
    }

    #[test]
    fn published_ports_are_spelled_for_a_process_on_this_machine() {
        let table = [
            (None, Ipv4Addr::UNSPECIFIED, "127.0.0.1"),
            (Some(""), Ipv4Addr::UNSPECIFIED, "127.0.0.1"),
            (Some("10.0.0.1"), Ipv4Addr::UNSPECIFIED, "10.0.0.1"),
            (None, Ipv4Addr::new(192, 0, 2, 7), "192.0.2.7"),
        ];
        for (told, published_on, expected) in table {
            assert_eq!(local_host(told, published_on), expected);
        }
    }
}
