//! Rules between keys, checked once when everything is read.
//!
//! A rule reports at the key that the operator most likely wants to change. Two weights: a *problem* keeps the server
//! from starting, a *warning* says that something has no effect. What weakens isolation or authentication when ignored
//! is always a problem.

use super::Config;
use super::egress::EgressMode;
use super::ingress::{GatewayConfig, IngressMode, RouteMode};
use super::kubernetes::WorkloadProvider;
use super::load::Loaded;
use super::problem::{Origin, Warning};
use super::reader::Reader;
use super::rules;
use super::runtime::RuntimeKind;
use super::secure_runtime::SecureRuntimeKind;
use super::store::StoreKind;
use super::tenants::TenantProvider;
use super::values::Quantity;

/// What a valid configuration still deserves to have said about it.
#[must_use]
pub fn report(loaded: &Loaded) -> Vec<Warning> {
    loaded.warnings.clone()
}

pub(super) fn check(config: &Config, reader: &mut Reader<'_>) {
    let mut rules = Rules { reader };
    rules.server(config);
    rules.runtime(config);
    rules.sections_of_other_runtimes(config);
    rules.docker(config);
    rules.store(config);
    rules.egress(config);
    rules.ingress(config);
    rules.secure_runtime(config);
    rules.renewal(config);
    rules.tenants(config);
    rules.kubernetes(config);
    rules.remarks(config);
}

struct Rules<'r, 'a> {
    reader: &'r mut Reader<'a>,
}

impl Rules<'_, '_> {
    /// The origin of a key, or of a section when no key has this name.
    fn origin(&self, path: &str) -> Origin {
        let entry = self.reader.entries.iter().find(|entry| entry.key == path);
        let heading = || self.reader.headings.iter().find(|heading| heading.path == path)?.origin.clone();
        entry.map(|entry| entry.origin.clone()).or_else(heading).unwrap_or(Origin::Default)
    }

    fn is_set(&self, path: &str) -> bool {
        let inside = format!("{path}.");
        let set = |entry: &super::reader::Entry| {
            (entry.key == path || entry.key.starts_with(&inside)) && entry.origin != Origin::Default
        };
        self.origin(path) != Origin::Default || self.reader.entries.iter().any(set)
    }

    /// A key that was already refused must not be complained about again.
    fn is_broken(&self, path: &str) -> bool {
        self.reader.problems.iter().any(|problem| problem.key == path)
    }

    fn require(&mut self, holds: bool, path: &str, message: impl Into<String>) {
        if !holds && !self.is_broken(path) {
            let origin = self.origin(path);
            self.reader.problem(path, origin, message);
        }
    }

    fn remark(&mut self, applies: bool, path: &str, message: impl Into<String>) {
        if applies {
            let origin = self.origin(path);
            self.reader.warning(path, origin, message);
        }
    }

    fn server(&mut self, config: &Config) {
        let server = &config.server;
        let tls = server.tls_cert.is_some() && server.tls_key.is_some();
        let message = "tls_cert and tls_key only go together";
        self.require(server.tls_key.is_none() || server.tls_cert.is_some(), "server.tls_cert", message);
        self.require(server.tls_cert.is_none() || server.tls_key.is_some(), "server.tls_key", message);
        self.require(
            tls || server.tls_redirect_port.is_none(),
            "server.tls_redirect_port",
            "needs server.tls_cert and server.tls_key: there is nothing to redirect to",
        );
        self.require(
            server.tls_redirect_port != Some(server.port),
            "server.tls_redirect_port",
            "must be another port than server.port",
        );
        self.remark(
            !tls && server.hsts_max_age.is_some(),
            "server.hsts_max_age_seconds",
            "has no effect without server.tls_cert and server.tls_key",
        );
    }

    fn runtime(&mut self, config: &Config) {
        let needs_image = config.runtime.kind == RuntimeKind::Kubernetes;
        self.require(
            !needs_image || config.runtime.execd_image.is_some(),
            "runtime.execd_image",
            format!("required when runtime.type is \"{}\"", config.runtime.kind),
        );
    }

    fn sections_of_other_runtimes(&mut self, config: &Config) {
        let kind = config.runtime.kind;
        for section in ["kubernetes", "agent_sandbox"] {
            if !self.is_set(section) {
                continue;
            }
            match kind {
                RuntimeKind::Docker => {
                    self.require(false, section, "must be left out when runtime.type is \"docker\"");
                }
                RuntimeKind::Embedded => {
                    self.remark(true, section, "has no effect when runtime.type is \"embedded\"");
                }
                RuntimeKind::Kubernetes => {}
            }
        }
        let unused = [("docker", kind == RuntimeKind::Embedded), ("embedded", kind != RuntimeKind::Embedded)];
        for (section, applies) in unused {
            let message = format!("has no effect when runtime.type is \"{kind}\"");
            self.remark(applies && self.is_set(section), section, message);
        }
    }

    fn docker(&mut self, config: &Config) {
        let (min, max) = (config.docker.port_range_min, config.docker.port_range_max);
        self.require(
            min < max && max - min >= 100,
            "docker.port_range_max",
            "must be at least 100 above docker.port_range_min",
        );
    }

    fn store(&mut self, config: &Config) {
        let postgresql = &config.store.postgresql;
        self.require(
            config.store.kind != StoreKind::Postgresql || postgresql.dsn.is_some(),
            "store.postgresql.dsn",
            "required when store.type is \"postgresql\" (better set as OPENSANDBOX_STORE_POSTGRESQL_DSN)",
        );
        self.require(
            postgresql.min_pool_size <= postgresql.max_pool_size,
            "store.postgresql.min_pool_size",
            "must not be above store.postgresql.max_pool_size",
        );
    }

    fn egress(&mut self, config: &Config) {
        let egress = &config.egress;
        self.requests_within_limits("egress.requests", &egress.requests, &egress.limits);
        let Some(proxy) = &egress.upstream_proxy else { return };
        self.require(
            egress.mode == EgressMode::DnsNft || egress.image.is_none(),
            "egress.mode",
            "must be \"dns+nft\" when [egress.upstream_proxy] is there and egress.image names another enforcer",
        );
        let kubernetes = config.runtime.kind == RuntimeKind::Kubernetes;
        self.require(
            proxy.ca_secret_name.is_none() || kubernetes,
            "egress.upstream_proxy.ca_secret_name",
            "is for Kubernetes only; use ca_cert_path",
        );
        self.require(
            proxy.ca_cert_path.is_none() || !kubernetes,
            "egress.upstream_proxy.ca_cert_path",
            "cannot be used on Kubernetes; use ca_secret_name",
        );
    }

    fn requests_within_limits(
        &mut self,
        path: &str,
        requests: &std::collections::BTreeMap<String, Quantity>,
        limits: &std::collections::BTreeMap<String, Quantity>,
    ) {
        for (name, request) in requests {
            let within = limits.get(name).is_none_or(|limit| request.nanos() <= limit.nanos());
            self.require(within, path, format!("the request for {name} is above its limit"));
        }
    }

    fn ingress(&mut self, config: &Config) {
        let ingress = &config.ingress;
        let gateway_mode = ingress.mode == IngressMode::Gateway;
        self.require(
            gateway_mode || ingress.listen.is_none(),
            "ingress.listen",
            "needs ingress.mode = \"gateway\"",
        );
        match &ingress.gateway {
            None => {
                self.require(!gateway_mode, "ingress.gateway", "required when ingress.mode is \"gateway\"")
            }
            Some(_) if !gateway_mode => {
                self.require(false, "ingress.gateway", "must be left out unless ingress.mode is \"gateway\"");
            }
            Some(gateway) => self.gateway_address(gateway),
        }
        let Some(access) = &ingress.secure_access else { return };
        self.require(gateway_mode, "ingress.secure_access", "needs ingress.mode = \"gateway\"");
        let known = access.keys.iter().any(|key| key.id == access.active_key);
        self.require(
            known || self.is_broken("ingress.secure_access.keys"),
            "ingress.secure_access.active_key",
            "is not among the ids of ingress.secure_access.keys",
        );
        self.secure_access_variables();
    }

    /// The reference takes the key ring from the environment as a whole or not at all.
    fn secure_access_variables(&mut self) {
        let from_environment = |rules: &Self, path: &str| matches!(rules.origin(path), Origin::Env { .. });
        let keys = from_environment(self, "ingress.secure_access.keys");
        let active = from_environment(self, "ingress.secure_access.active_key");
        self.require(
            keys == active,
            "ingress.secure_access",
            "the keys and the active key must both come from the environment or neither",
        );
    }

    fn gateway_address(&mut self, gateway: &GatewayConfig) {
        let address = gateway.address.as_str();
        let path = "ingress.gateway.address";
        if self.is_broken("ingress.gateway.route.mode") {
            // Which addresses are right depends on it.
            return;
        }
        self.require(!address.contains("://"), path, "must not carry a scheme; clients choose it");
        match gateway.route {
            RouteMode::Wildcard => self.require(
                rules::is_wildcard_domain(address),
                path,
                "must be a wildcard domain (`*.example.com`) when the route mode is \"wildcard\"",
            ),
            RouteMode::Header => self.require(
                rules::is_host_port(address),
                path,
                "must be a host name or an address, with an optional port, when the route mode is \"header\"",
            ),
            RouteMode::Uri => {
                self.require(
                    !address.contains('*'),
                    path,
                    "must not contain `*` unless the route mode is \"wildcard\"",
                );
            }
        }
    }

    fn secure_runtime(&mut self, config: &Config) {
        let secure = &config.secure_runtime;
        let (docker, class) = (secure.docker_runtime.is_some(), secure.k8s_runtime_class.is_some());
        let kind = "secure_runtime.type";
        match secure.kind {
            SecureRuntimeKind::None => {
                let message = "must be left out while secure_runtime.type is empty";
                self.require(!docker, "secure_runtime.docker_runtime", message);
                self.require(!class, "secure_runtime.k8s_runtime_class", message);
                return;
            }
            SecureRuntimeKind::Firecracker => {
                self.require(
                    config.runtime.kind == RuntimeKind::Kubernetes,
                    kind,
                    "\"firecracker\" needs runtime.type = \"kubernetes\"",
                );
                self.require(class, "secure_runtime.k8s_runtime_class", "required for \"firecracker\"");
            }
            SecureRuntimeKind::Gvisor | SecureRuntimeKind::Kata => {
                self.require(docker || class, kind, "needs docker_runtime or k8s_runtime_class beside it");
            }
        }
        self.require(
            config.runtime.kind != RuntimeKind::Embedded,
            kind,
            "the embedded runtime cannot give this isolation; leave it empty or choose another runtime.type",
        );
    }

    fn renewal(&mut self, config: &Config) {
        let redis = &config.renew_intent.redis;
        self.require(
            !redis.enabled || redis.dsn.is_some(),
            "renew_intent.redis.dsn",
            "required when renew_intent.redis.enabled is true",
        );
    }

    fn tenants(&mut self, config: &Config) {
        let Some(tenants) = &config.tenants else { return };
        self.require(
            !config.server.open_proxy,
            "server.open_proxy",
            "must be false when [tenants] is there: ports of sandboxes need a key or a token then",
        );
        self.require(
            !config.ingress.open_gateway,
            "ingress.open_gateway",
            "must be false when [tenants] is there: ports of sandboxes need a token then",
        );
        // Elsewhere than on loopback it is remarked upon anyway.
        let shows_host = config.runtime.kind == RuntimeKind::Embedded
            && config.offers_host_image()
            && config.server.listens_on_loopback();
        self.remark(
            shows_host,
            "embedded.host_image",
            "every tenant can read this machine's files through the image `host`",
        );
        self.require(
            config.server.api_key.as_ref().is_none_or(|key| key.expose().trim().is_empty()),
            "server.api_key",
            "must be left out when [tenants] is there: each tenant brings its own keys",
        );
        self.require(
            tenants.provider != TenantProvider::Http || tenants.endpoint.is_some(),
            "tenants.endpoint",
            "required when tenants.provider is \"http\"",
        );
        let lonely = tenants.auth_header.is_some() != tenants.auth_token.is_some();
        self.remark(
            lonely,
            "tenants.auth_header",
            "auth_header and auth_token only work together; neither is sent",
        );
    }

    fn kubernetes(&mut self, config: &Config) {
        let kubernetes = &config.kubernetes;
        let resources = &kubernetes.execd_init_resources;
        let path = "kubernetes.execd_init_resources.requests";
        self.requests_within_limits(path, &resources.requests, &resources.limits);
        let other_provider = config.runtime.kind == RuntimeKind::Kubernetes
            && kubernetes.workload_provider != WorkloadProvider::AgentSandbox;
        self.require(
            !(other_provider && self.is_set("agent_sandbox")),
            "agent_sandbox",
            "needs kubernetes.workload_provider = \"agent-sandbox\"",
        );
    }

    fn remarks(&mut self, config: &Config) {
        self.remark(
            config.server.open_proxy,
            "server.open_proxy",
            "anybody who reaches this server can reach every port of every sandbox without a key",
        );
        self.remark(
            config.ingress.open_gateway,
            "ingress.open_gateway",
            "anybody who reaches the gateway can reach every port of every sandbox that was created without `secureAccess`",
        );
        self.remark(
            config.embedded.host_image == super::HostImage::Always && !config.server.listens_on_loopback(),
            "embedded.host_image",
            "clients from elsewhere can read this machine's files through the image `host`",
        );
        let relative = config.storage.allowed_host_paths.iter().any(|path| !path.is_absolute());
        self.remark(relative, "storage.allowed_host_paths", "an entry that is not absolute never matches");
    }
}
