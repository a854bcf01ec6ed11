//! `[embedded]`: Sandglass's own runtime.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{Cap, FilePath, Int, ListOf, Span, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::SubnetChoice;

choice! {
    /// When the image `host` may be used by clients.
    HostImage {
        /// Only while the API is reachable from this machine alone.
        Loopback = "loopback",
        Always = "always",
        Never = "never",
    }
}

choice! {
    /// What an endpoint answer points at.
    EndpointStyle {
        /// The server's own address with a proxy path.
        Proxied = "proxied",
        /// The sandbox's own address, for clients on the same machine.
        Direct = "direct",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddedConfig {
    pub state_dir: PathBuf,
    pub host_image: HostImage,
    pub subnet: SubnetChoice,
    pub endpoints: EndpointStyle,
    /// Empty means the host's own resolvers.
    pub dns: Vec<IpAddr>,
    pub pids_limit: u64,
    /// How long a create request waits for the sandbox to run before it answers `Pending`.
    pub create_grace: Duration,
    /// How long after expiry a sandbox removes itself when the server did not.
    pub expiry_grace: Duration,
    /// Registries (`host[:port]`) that are spoken to without TLS.
    pub insecure_registries: Vec<String>,
    /// `None` means no cap.
    pub max_sandboxes: Option<usize>,
}

impl Default for EmbeddedConfig {
    fn default() -> Self {
        Self {
            state_dir: PathBuf::from("/var/lib/sandglass"),
            host_image: HostImage::Loopback,
            subnet: SubnetChoice::Auto,
            endpoints: EndpointStyle::Proxied,
            dns: Vec::new(),
            pids_limit: 4096,
            create_grace: Duration::from_millis(2000),
            expiry_grace: Duration::from_secs(15),
            insecure_registries: Vec::new(),
            max_sandboxes: None,
        }
    }
}

impl EmbeddedConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "state_dir",
            FilePath::absolute(),
            &mut self.state_dir,
            "Directory of everything the embedded runtime keeps: sandboxes, images, and the database unless \
             `store.path` says otherwise.",
        );
        section.key(
            "host_image",
            Words::new(),
            &mut self.host_image,
            "When the image `host`, a writable view of this machine's own system directories, may be used: only while \
             `server.host` is a loopback address and there are no tenants, always, or never.",
        );
        section.key(
            "subnet",
            rules::subnet(),
            &mut self.subnet,
            "Addresses of the sandboxes. `auto` picks a free network at the first start and keeps it; another is taken only while there are no sandboxes and if it is no longer free. A configured network that overlaps the one of another running server is refused.",
        );
        section.key(
            "endpoints",
            Words::new(),
            &mut self.endpoints,
            "What endpoint answers point at: a path of this server, or the sandbox's own address for clients on the same \
             machine.",
        );
        section.key(
            "dns",
            ListOf(rules::ip_address()),
            &mut self.dns,
            "Resolvers of the sandboxes. Empty takes the host's.",
        );
        section.key("pids_limit", Int::at_least(1), &mut self.pids_limit, "Most processes in a sandbox.");
        section.key(
            "create_grace_ms",
            Span::milliseconds(0),
            &mut self.create_grace,
            "How long a create request waits for the sandbox to run before it answers `Pending`.",
        );
        section.key(
            "expiry_grace_seconds",
            Span::seconds(0),
            &mut self.expiry_grace,
            "How long after its expiry a sandbox removes itself when no server did.",
        );
        section.key(
            "insecure_registries",
            ListOf(Text::that("`host` or `host:port`", rules::is_host_port)),
            &mut self.insecure_registries,
            "Registries spoken to without TLS.",
        );
        section.key("max_sandboxes", Cap, &mut self.max_sandboxes, "Most sandboxes at once.");
    }
}
