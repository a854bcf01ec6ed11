//! `[docker]`: the Docker Engine backend.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::values::Secret;

#[derive(Clone, Debug, PartialEq)]
pub struct DockerConfig {
    /// `host`, `bridge` or a network's name, in lower case.
    pub network_mode: String,
    pub api_timeout: Duration,
    pub host_ip: Option<String>,
    pub drop_capabilities: Vec<String>,
    pub apparmor_profile: Option<String>,
    pub seccomp_profile: Option<String>,
    pub no_new_privileges: bool,
    pub pids_limit: u64,
    pub port_range_min: u16,
    pub port_range_max: u16,
    pub publish_host: Ipv4Addr,
    /// Values are secrets here, because tokens are what people put into an environment.
    pub sandbox_env: BTreeMap<String, Secret>,
    pub sandbox_binds: Vec<String>,
}

impl Default for DockerConfig {
    fn default() -> Self {
        let dropped = [
            "AUDIT_WRITE",
            "MKNOD",
            "NET_ADMIN",
            "NET_RAW",
            "SYS_ADMIN",
            "SYS_MODULE",
            "SYS_PTRACE",
            "SYS_TIME",
            "SYS_TTY_CONFIG",
        ];
        Self {
            network_mode: "host".to_owned(),
            api_timeout: Duration::from_secs(180),
            host_ip: None,
            drop_capabilities: dropped.map(str::to_owned).to_vec(),
            apparmor_profile: None,
            seccomp_profile: None,
            no_new_privileges: true,
            pids_limit: 4096,
            port_range_min: 40_000,
            port_range_max: 60_000,
            publish_host: Ipv4Addr::UNSPECIFIED,
            sandbox_env: BTreeMap::new(),
            sandbox_binds: Vec::new(),
        }
    }
}
