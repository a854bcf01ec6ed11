//! From configuration and specification to the engine's host configuration: pure functions.

use std::{collections::HashMap, fs, path::Path};

use bollard::models::{DeviceRequest, HostConfig, ResourcesUlimits};
use sandglass_sandbox::{
    ports::runtime::RuntimeError,
    spec::{Gpu, Limits, Spec},
};

use super::{
    DockerConfig,
    errors::{failed, invalid},
};

/// The extension that asks for namespaces inside the box.
const ISOLATION: (&str, &str) = ("bootstrap.execd.isolation", "enable");
/// What a box with a network policy never has.
const GUARDED: [&str; 2] = ["NET_ADMIN", "NET_RAW"];
const ISOLATION_DIRECTORY: &str = "/var/lib/execd/isolation";

/// Whether the box's agent gets what it needs to make namespaces: more than a policy can hold, because the box shares its enforcer's network.
pub(super) fn divides_itself(spec: &Spec) -> bool {
    spec.extensions.get(ISOLATION.0).is_some_and(|value| value == ISOLATION.1)
}

/// Refuses configuration that no create could succeed with.
pub(super) fn check(config: &DockerConfig) -> Result<(), RuntimeError> {
    config.ulimits.iter().try_for_each(|text| ulimit(text).map(drop))?;
    if !config.ossfs_mount_root.is_absolute() {
        tracing::warn!(
            "[storage] ossfs_mount_root {} is not absolute; bucket volumes will be refused",
            config.ossfs_mount_root.display()
        );
    }
    Ok(())
}

/// What the engine is told as seccomp profile. It wants the content of a file, not its path.
pub(super) fn seccomp(config: &DockerConfig) -> Result<Option<String>, RuntimeError> {
    let Some(profile) = config.seccomp_profile.as_deref().filter(|p| !p.is_empty()) else { return Ok(None) };
    if matches!(profile, "unconfined" | "builtin") {
        return Ok(Some(profile.to_owned()));
    }
    let refuse =
        |e: &dyn std::fmt::Display| failed("seccomp", format!("[docker] seccomp_profile {profile}: {e}"));
    let text = if profile.starts_with('{') {
        profile.to_owned()
    } else {
        fs::read_to_string(Path::new(profile)).map_err(|e| refuse(&e))?
    };
    let parsed: serde_json::Value = serde_json::from_str(&text).map_err(|e| refuse(&e))?;
    if !parsed.is_object() {
        return Err(refuse(&"not a JSON object"));
    }
    Ok(Some(parsed.to_string()))
}

/// Everything about a container that does not depend on the one box: limits and confinement.
pub(super) fn confined(config: &DockerConfig, seccomp: Option<&str>, spec: &Spec) -> HostConfig {
    let isolation = divides_itself(spec);
    let mut host = HostConfig {
        binds: Some(config.sandbox_binds.clone()).filter(|b| !b.is_empty()),
        runtime: config.secure_runtime.clone(),
        security_opt: Some(security_options(config, seccomp, isolation)).filter(|o| !o.is_empty()),
        ulimits: Some(config.ulimits.iter().filter_map(|text| ulimit(text).ok()).collect::<Vec<_>>())
            .filter(|u| !u.is_empty()),
        ..HostConfig::default()
    };
    limit(&mut host, &spec.limits, config.pids_limit);
    let mut drop = config.drop_capabilities.clone();
    if spec.egress.is_some() {
        // The rules live in the network namespace that the box shares with its sidecar. Raw sockets get past them, and either of the two
        // capabilities is enough to mark packets as the sidecar's own.
        let missing = GUARDED.into_iter().filter(|name| !drop.iter().any(|c| is_capability(c, name)));
        let missing: Vec<String> = missing.map(str::to_owned).collect();
        drop.extend(missing);
    }
    if isolation {
        drop.retain(|c| !is_capability(c, "SYS_ADMIN"));
        host.cap_add = Some(vec!["SYS_ADMIN".to_owned()]);
        host.tmpfs = Some(HashMap::from([(ISOLATION_DIRECTORY.to_owned(), String::new())]));
        host.masked_paths = Some(Vec::new());
        host.readonly_paths = Some(Vec::new());
    }
    host.cap_drop = Some(drop).filter(|d| !d.is_empty());
    host
}

fn limit(host: &mut HostConfig, limits: &Limits, default_pids: Option<u64>) {
    let signed = |n: u64| i64::try_from(n).unwrap_or(i64::MAX);
    host.memory = limits.memory_bytes.map(signed);
    // The limit of a box is that of its memory and swap together; a box that swaps disturbs all others.
    host.memory_swap = host.memory;
    host.nano_cpus = limits.cpu_millis.map(|millis| signed(millis.saturating_mul(1_000_000)));
    host.pids_limit = limits.pids.or(default_pids).map(signed);
    host.device_requests = limits.gpu.map(|gpu| {
        let count = match gpu {
            Gpu::All => -1,
            Gpu::Count(count) => i64::from(count),
        };
        vec![DeviceRequest {
            driver: Some(String::new()),
            count: Some(count),
            capabilities: Some(vec![vec!["gpu".to_owned()]]),
            ..DeviceRequest::default()
        }]
    });
}

fn security_options(config: &DockerConfig, seccomp: Option<&str>, isolation: bool) -> Vec<String> {
    let mut options = Vec::new();
    if config.no_new_privileges {
        options.push("no-new-privileges=true".to_owned());
    }
    let apparmor = config.apparmor_profile.as_deref().filter(|p| !p.is_empty());
    if isolation {
        options.extend(["apparmor=unconfined".to_owned(), "seccomp=unconfined".to_owned()]);
    } else {
        options.extend(apparmor.map(|profile| format!("apparmor={profile}")));
        options.extend(seccomp.map(|profile| format!("seccomp={profile}")));
    }
    options
}

/// Engines take capabilities with and without the kernel's prefix, in any case.
pub(super) fn is_capability(text: &str, name: &str) -> bool {
    let upper = text.to_ascii_uppercase();
    upper.strip_prefix("CAP_").unwrap_or(&upper) == name
}

/// `name=soft[:hard]`; `-1` is no limit.
fn ulimit(text: &str) -> Result<ResourcesUlimits, RuntimeError> {
    let parsed = text.split_once('=').and_then(|(name, values)| {
        let (soft, hard) = values.split_once(':').unwrap_or((values, values));
        let (soft, hard) = (soft.parse::<i64>().ok()?, hard.parse::<i64>().ok()?);
        let ordered = hard == -1 || (soft != -1 && soft <= hard);
        (!name.is_empty() && soft >= -1 && hard >= -1 && ordered).then(|| ResourcesUlimits {
            name: Some(name.to_owned()),
            soft: Some(soft),
            hard: Some(hard),
        })
    });
    parsed.ok_or_else(|| invalid("ulimits", format!("[docker] ulimits {text:?}: expected name=soft[:hard]")))
}

#[cfg(test)]
pub(super) mod tests {
    use std::{net::Ipv4Addr, time::Duration};

    use sandglass_sandbox::spec::{Egress, Entrypoint};

    use super::{super::EgressConfig, super::EngineAddress, *};

    pub(in super::super) fn config() -> DockerConfig {
        DockerConfig {
            engine: EngineAddress::Unix("/run/docker.sock".into()),
            state_dir: "/state".into(),
            side_facts_dir: "/side".into(),
            network_mode: "bridge".into(),
            api_timeout: Duration::from_secs(180),
            host_ip: None,
            server_host: "127.0.0.1".into(),
            drop_capabilities: ["MKNOD", "SYS_ADMIN"].map(str::to_owned).to_vec(),
            apparmor_profile: None,
            seccomp_profile: None,
            no_new_privileges: true,
            pids_limit: Some(4096),
            ports: 40000..=60000,
            publish_host: Ipv4Addr::UNSPECIFIED,
            reaches_containers: true,
            sandbox_binds: vec![],
            ulimits: vec![],
            egress: EgressConfig {
                image: Some("egress:1".into()),
                mode: "dns".into(),
                limits: Limits::default(),
                disable_ipv6: true,
                otlp_endpoint: None,
                readiness_timeout: Duration::from_secs(30),
                upstream_proxy: None,
            },
            secure_runtime: None,
            run_as_init: false,
            allowed_host_paths: vec![],
            ossfs_mount_root: "/mnt/ossfs".into(),
            execd_image: None,
        }
    }

    pub(in super::super) fn spec() -> Spec {
        Spec::new("busybox", Entrypoint::Command(vec!["sleep".into(), "1".into()]))
    }

    #[test]
    fn limits_in_the_engines_units() {
        let limits = Limits {
            cpu_millis: Some(500),
            memory_bytes: Some(1 << 30),
            pids: None,
            gpu: Some(Gpu::Count(2)),
            disk_bytes: None,
        };
        let host = confined(&config(), None, &Spec { limits, ..spec() });
        assert_eq!(host.nano_cpus, Some(500_000_000));
        assert_eq!((host.memory, host.memory_swap), (Some(1 << 30), Some(1 << 30)));
        assert_eq!(host.pids_limit, Some(4096));
        let gpu = &host.device_requests.unwrap()[0];
        assert_eq!((gpu.count, gpu.driver.as_deref()), (Some(2), Some("")));
        assert_eq!(gpu.capabilities, Some(vec![vec!["gpu".to_owned()]]));

        let all = Limits { gpu: Some(Gpu::All), pids: Some(7), ..Limits::default() };
        let host = confined(&config(), None, &Spec { limits: all, ..spec() });
        assert_eq!(host.device_requests.unwrap()[0].count, Some(-1));
        assert_eq!((host.pids_limit, host.memory, host.memory_swap), (Some(7), None, None));
    }

    #[test]
    fn what_is_not_configured_is_the_engines_default() {
        let plain = DockerConfig {
            no_new_privileges: false,
            pids_limit: None,
            drop_capabilities: vec![],
            ..config()
        };
        assert_eq!(confined(&plain, None, &spec()), HostConfig::default());
    }

    #[test]
    fn confinement_as_configured() {
        let strict = DockerConfig {
            apparmor_profile: Some("docker-default".into()),
            secure_runtime: Some("runsc".into()),
            ulimits: vec!["nofile=1024:2048".into(), "core=0".into()],
            sandbox_binds: vec!["/a:/b:ro".into()],
            ..config()
        };
        let host = confined(&strict, Some("{}"), &spec());
        let options = ["no-new-privileges=true", "apparmor=docker-default", "seccomp={}"].map(str::to_owned);
        assert_eq!(host.security_opt, Some(options.to_vec()));
        assert_eq!(host.runtime.as_deref(), Some("runsc"));
        assert_eq!(host.cap_drop, Some(vec!["MKNOD".to_owned(), "SYS_ADMIN".to_owned()]));
        assert_eq!(host.binds, Some(vec!["/a:/b:ro".to_owned()]));
        let limits: Vec<_> =
            host.ulimits.unwrap().into_iter().map(|u| (u.name.unwrap(), u.soft, u.hard)).collect();
        assert_eq!(
            limits,
            [("nofile".to_owned(), Some(1024), Some(2048)), ("core".to_owned(), Some(0), Some(0))]
        );
        for bad in ["nofile", "=1", "nofile=a", "nofile=2:1", "nofile=-2", "nofile=-1:5"] {
            assert!(ulimit(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn isolation_loosens_what_it_needs_and_nothing_else() {
        let mut wanted = spec();
        wanted.extensions.insert(ISOLATION.0.into(), ISOLATION.1.into());
        let host = confined(&config(), Some("{}"), &wanted);
        assert_eq!(host.cap_add, Some(vec!["SYS_ADMIN".to_owned()]));
        assert_eq!(host.cap_drop, Some(vec!["MKNOD".to_owned()]));
        let options =
            ["no-new-privileges=true", "apparmor=unconfined", "seccomp=unconfined"].map(str::to_owned);
        assert_eq!(host.security_opt, Some(options.to_vec()));
        assert_eq!((host.masked_paths, host.readonly_paths), (Some(vec![]), Some(vec![])));
        assert!(host.tmpfs.unwrap().contains_key(ISOLATION_DIRECTORY));
        assert_eq!(host.privileged, None);

        wanted.extensions.insert(ISOLATION.0.into(), "yes".into());
        assert_eq!(confined(&config(), None, &wanted).cap_add, None);
    }

    #[test]
    fn a_box_with_a_policy_cannot_change_its_rules() {
        let wanted = Spec { egress: Some(Egress::default_for_tests()), ..spec() };
        let host = confined(&config(), None, &wanted);
        let dropped = host.cap_drop.unwrap();
        assert!(GUARDED.iter().all(|name| dropped.contains(&(*name).to_owned())), "{dropped:?}");
        for named in [vec![], vec!["cap_net_admin".to_owned()], vec!["ALL".to_owned()]] {
            let config = DockerConfig { drop_capabilities: named.clone(), ..config() };
            let dropped = confined(&config, None, &wanted).cap_drop.unwrap();
            for name in GUARDED {
                assert_eq!(dropped.iter().filter(|c| is_capability(c, name)).count(), 1, "{named:?}");
            }
        }
    }

    trait ForTests {
        fn default_for_tests() -> Egress;
    }

    impl ForTests for Egress {
        fn default_for_tests() -> Egress {
            Egress { policy: Default::default(), credential_proxy: false, env: vec![] }
        }
    }

    #[test]
    fn a_seccomp_profile_is_read_from_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let with = |profile: &str| DockerConfig { seccomp_profile: Some(profile.into()), ..config() };
        assert_eq!(seccomp(&config()).unwrap(), None);
        assert_eq!(seccomp(&with("")).unwrap(), None);
        assert_eq!(seccomp(&with("unconfined")).unwrap().as_deref(), Some("unconfined"));
        assert_eq!(seccomp(&with("{ \"a\": 1 }")).unwrap().as_deref(), Some("{\"a\":1}"));
        let file = dir.path().join("profile.json");
        let path = file.to_str().unwrap();
        assert!(seccomp(&with(path)).unwrap_err().message.contains(path));
        fs::write(&file, "{\n \"defaultAction\": \"SCMP_ACT_ERRNO\"\n}\n").unwrap();
        assert_eq!(seccomp(&with(path)).unwrap().as_deref(), Some("{\"defaultAction\":\"SCMP_ACT_ERRNO\"}"));
        fs::write(&file, "[]").unwrap();
        assert!(seccomp(&with(path)).is_err());
    }
}
