//! The configuration: one TOML file, the upstream one accepted unchanged, plus the environment.
//!
//! Owns reading, checking and explaining the settings; does not act on any of them. Every key is declared exactly once,
//! in its section's `keys` function, and everything else (parsing, environment names, `config show`, the reference page,
//! suggestions for misspelt keys) is derived from that one declaration. Keep it that way: a key that is read elsewhere
//! would be invisible to the operator.

mod agent_sandbox;
mod builds;
pub mod check;
mod choice;
mod docker;
mod document;
mod egress;
mod embedded;
mod environment;
pub mod guard;
mod ingress;
mod kinds;
mod kubernetes;
mod load;
mod log;
mod otel;
mod problem;
mod proxy;
mod reader;
pub mod reference;
mod renew_intent;
mod rules;
mod runtime;
mod secure_runtime;
mod server;
pub mod show;
mod storage;
mod store;
mod tenants;
mod values;
mod webhooks;
mod workspaces;

pub use agent_sandbox::{AgentSandboxConfig, ShutdownPolicy};
pub use builds::{BuildsConfig, EngineBuilder};
pub use choice::Choice;
pub use docker::DockerConfig;
pub use egress::{EgressConfig, EgressMode, UpstreamProxyConfig};
pub use embedded::{EmbeddedConfig, EndpointStyle, HostImage};
pub use environment::{Environment, ProcessEnvironment};
pub use ingress::{
    GatewayConfig, IngressConfig, IngressMode, RouteMode, SecureAccessConfig, SecureAccessKey,
    SignatureChoice,
};
pub use kubernetes::{ContainerResources, KubernetesConfig, RateLimit, WorkloadProvider};
pub use load::{LoadOptions, Loaded, PATH_VARIABLE, load, read};
pub use log::{LogConfig, LogFormat, LogLevel};
pub use otel::OtelConfig;
pub use problem::{ConfigErrors, Origin, Problem, Warning};
pub use proxy::ProxyConfig;
pub use reader::Entry;
pub use renew_intent::{RedisConfig, RenewIntentConfig};
pub use runtime::{RuntimeConfig, RuntimeKind};
pub use secure_runtime::{SecureRuntimeConfig, SecureRuntimeKind};
pub use server::{EventLoop, HttpParser, ServerConfig};
pub use storage::StorageConfig;
pub use store::{PostgresConfig, StoreConfig, StoreKind};
pub use tenants::{TenantProvider, TenantsConfig};
pub use values::{ByteSize, Endpoint, Ipv4Subnet, Quantity, Secret, SubnetChoice};
pub use webhooks::WebhooksConfig;
pub use workspaces::WorkspacesConfig;

use reader::Reader;

#[cfg(test)]
mod tests;

/// Everything an operator can set, one field a section.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Config {
    pub server: ServerConfig,
    pub proxy: ProxyConfig,
    pub log: LogConfig,
    pub runtime: RuntimeConfig,
    pub docker: DockerConfig,
    pub embedded: EmbeddedConfig,
    pub builds: BuildsConfig,
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
    pub workspaces: WorkspacesConfig,
    pub webhooks: WebhooksConfig,
}

impl Config {
    /// Declares every section; what is not declared here does not exist.
    fn keys(&mut self, reader: &mut Reader<'_>) {
        reader.section(
            "server",
            "Where the API listens and what protects it.",
            &mut self.server,
            ServerConfig::keys,
        );
        reader.section(
            "log",
            "What is logged, in which shape, and where to.",
            &mut self.log,
            LogConfig::keys,
        );
        reader.section(
            "runtime",
            "Which backend runs the sandboxes.",
            &mut self.runtime,
            RuntimeConfig::keys,
        );
        reader.section(
            "embedded",
            "Sandglass's own runtime: sandboxes straight from the kernel, no daemon.",
            &mut self.embedded,
            EmbeddedConfig::keys,
        );
        reader.section("builds", "Images from repositories.", &mut self.builds, BuildsConfig::keys);
        reader.section(
            "workspaces",
            "Sandboxes that are made from repositories.",
            &mut self.workspaces,
            WorkspacesConfig::keys,
        );
        reader.section(
            "webhooks",
            "Events that are sent to receivers.",
            &mut self.webhooks,
            WebhooksConfig::keys,
        );
        reader.section("storage", "What requests may mount.", &mut self.storage, StorageConfig::keys);
        reader.section("store", "The server's own database.", &mut self.store, StoreConfig::keys);
        reader.section(
            "proxy",
            "How the server reaches sandboxes for clients.",
            &mut self.proxy,
            ProxyConfig::keys,
        );
        reader.section(
            "ingress",
            "How sandboxes are reached from outside.",
            &mut self.ingress,
            IngressConfig::keys,
        );
        reader.section("egress", "What sandboxes may reach.", &mut self.egress, EgressConfig::keys);
        reader.section(
            "renew_intent",
            "Sandboxes that live on while they are used.",
            &mut self.renew_intent,
            RenewIntentConfig::keys,
        );
        reader.section("otel", "Export of metrics and traces.", &mut self.otel, OtelConfig::keys);
        reader.section("docker", "The Docker Engine backend.", &mut self.docker, DockerConfig::keys);
        reader.section(
            "secure_runtime",
            "A stronger isolation boundary (docker and kubernetes).",
            &mut self.secure_runtime,
            SecureRuntimeConfig::keys,
        );
        reader.section("kubernetes", "The Kubernetes backend.", &mut self.kubernetes, KubernetesConfig::keys);
        reader.section(
            "agent_sandbox",
            "The workload provider `agent-sandbox` on Kubernetes.",
            &mut self.agent_sandbox,
            AgentSandboxConfig::keys,
        );
        reader.optional(
            "tenants",
            "Its presence makes the server multi-tenant, on every runtime, and replaces `server.api_key`.",
            &mut self.tenants,
            TenantsConfig::keys,
        );
    }

    /// Whether the image named `host` (the machine's own file system, read-only below) is offered to clients.
    #[must_use]
    pub fn offers_host_image(&self) -> bool {
        match self.embedded.host_image {
            HostImage::Always => true,
            HostImage::Never => false,
            // Behind a loopback address there may be a proxy for many; a key of one's own does not make one the operator.
            HostImage::Loopback => self.server.listens_on_loopback() && self.tenants.is_none(),
        }
    }
}
