//! The configuration: one TOML file, the upstream one accepted unchanged, plus the environment.
//!
//! Owns reading, checking and explaining the settings; does not act on any of them. Every key is declared exactly once,
//! in its section's `keys` function, and everything else (parsing, environment names, `config show`, the reference page,
//! suggestions for misspelt keys) is derived from that one declaration. Keep it that way: a key that is read elsewhere
//! would be invisible to the operator.

mod agent_sandbox;
mod choice;
mod docker;
mod egress;
mod embedded;
mod ingress;
mod kubernetes;
mod log;
mod otel;
mod proxy;
mod renew_intent;
mod runtime;
mod secure_runtime;
mod server;
mod storage;
mod store;
mod tenants;
mod values;

pub use agent_sandbox::{AgentSandboxConfig, ShutdownPolicy};
pub use choice::Choice;
pub use docker::DockerConfig;
pub use egress::{EgressConfig, EgressMode, UpstreamProxyConfig};
pub use embedded::{EmbeddedConfig, EndpointStyle, HostImage};
pub use ingress::{
    GatewayConfig, IngressConfig, IngressMode, RouteMode, SecureAccessConfig, SecureAccessKey,
};
pub use kubernetes::{ContainerResources, KubernetesConfig, RateLimit, WorkloadProvider};
pub use log::{LogConfig, LogFormat, LogLevel};
pub use otel::OtelConfig;
pub use proxy::ProxyConfig;
pub use renew_intent::{RedisConfig, RenewIntentConfig};
pub use runtime::{RuntimeConfig, RuntimeKind};
pub use secure_runtime::{SecureRuntimeConfig, SecureRuntimeKind};
pub use server::{EventLoop, HttpParser, ServerConfig};
pub use storage::StorageConfig;
pub use store::{PostgresConfig, StoreConfig, StoreKind};
pub use tenants::{TenantProvider, TenantsConfig};
pub use values::{ByteSize, Ipv4Subnet, Quantity, Secret, SubnetChoice};

/// Everything an operator can set, one field a section.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    pub server: ServerConfig,
    pub proxy: ProxyConfig,
    pub log: LogConfig,
    pub runtime: RuntimeConfig,
    pub docker: DockerConfig,
    pub embedded: EmbeddedConfig,
    pub storage: StorageConfig,
    pub store: StoreConfig,
    pub egress: EgressConfig,
    pub ingress: IngressConfig,
    pub secure_runtime: SecureRuntimeConfig,
    pub renew_intent: RenewIntentConfig,
    pub otel: OtelConfig,
    /// Present means multi-tenant; it then replaces `server.api_key`.
    pub tenants: Option<TenantsConfig>,
    pub kubernetes: KubernetesConfig,
    pub agent_sandbox: AgentSandboxConfig,
}

impl Config {
    /// Whether the image named `host` (the machine's own file system, read-only below) is offered to clients.
    #[must_use]
    pub fn offers_host_image(&self) -> bool {
        match self.embedded.host_image {
            HostImage::Always => true,
            HostImage::Never => false,
            HostImage::Loopback => self.server.listens_on_loopback(),
        }
    }
}
