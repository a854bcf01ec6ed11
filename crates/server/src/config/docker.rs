//! `[docker]`: the Docker Engine backend.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;
use std::time::Duration;

use super::kinds::{Flag, Int, ListOf, Maybe, SecretText, Span, TableOf, Text};
use super::reader::Section;
use super::rules;
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

impl DockerConfig {
    /// Whether sandboxes are confined further than by default: a profile is named, or they have fewer capabilities or processes.
    #[must_use]
    pub fn confines_further(&self) -> bool {
        let usual = Self::default();
        let bare = |name: &str| name.to_ascii_uppercase().trim_start_matches("CAP_").to_owned();
        let drops = |name: &String| usual.drop_capabilities.iter().any(|known| bare(known) == bare(name));
        self.apparmor_profile.is_some()
            || self.seccomp_profile.is_some()
            || self.pids_limit < usual.pids_limit
            || !self.drop_capabilities.iter().all(drops)
    }
}

impl DockerConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        self.network_keys(section);
        section.key(
            "drop_capabilities",
            ListOf(Text::non_empty()),
            &mut self.drop_capabilities,
            "Capabilities that containers lose.",
        );
        section.key(
            "apparmor_profile",
            Maybe(Text::any()),
            &mut self.apparmor_profile,
            "AppArmor profile; unset is the engine's default.",
        );
        section.key(
            "seccomp_profile",
            Maybe(Text::any()),
            &mut self.seccomp_profile,
            "Seccomp profile, passed to the Engine API as it is; unset is the engine's default.",
        );
        section.key(
            "no_new_privileges",
            Flag,
            &mut self.no_new_privileges,
            "Whether set-user-id programs gain nothing.",
        );
        section.key("pids_limit", Int::at_least(1), &mut self.pids_limit, "Most processes in a sandbox.");
        section.key(
            "sandbox_env",
            TableOf { names: rules::is_variable_name, values: SecretText::any() },
            &mut self.sandbox_env,
            "Environment of every sandbox; what a request sets wins. Values are treated as secrets.",
        );
        section.key(
            "sandbox_binds",
            ListOf(Text::that("`src:dst[:mode]`", rules::is_bind)),
            &mut self.sandbox_binds,
            "Binds of every sandbox.",
        );
    }

    fn network_keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "network_mode",
            Text::non_empty().rewritten(|mode| mode.trim().to_lowercase()),
            &mut self.network_mode,
            "`host`, `bridge` or the name of a network.",
        );
        section.key(
            "api_timeout",
            Span::seconds(1),
            &mut self.api_timeout,
            "Seconds that one call of the engine may take.",
        );
        section.key(
            "host_ip",
            Maybe(Text::any()),
            &mut self.host_ip,
            "Host of mapped ports when the server itself runs in a container.",
        );
        section.key(
            "port_range_min",
            Int::within(1024..=65_535),
            &mut self.port_range_min,
            "First host port for sandboxes.",
        );
        section.key(
            "port_range_max",
            Int::within(1024..=65_535),
            &mut self.port_range_max,
            "Last host port for sandboxes, at least 100 above the first.",
        );
        section.key(
            "publish_host",
            rules::publish_address(),
            &mut self.publish_host,
            "Address on which ports are published.",
        );
    }
}
