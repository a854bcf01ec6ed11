//! `[embedded]`: Sandglass's own runtime.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
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
