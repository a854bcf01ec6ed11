//! `[kubernetes]`: the Kubernetes backend.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
use super::kinds::{FilePath, Flag, Float, Int, Maybe, Span, Text, Words};
use super::reader::Section;
use super::rules;
use super::values::Quantity;

choice! {
    WorkloadProvider {
        BatchSandbox = "batchsandbox",
        AgentSandbox = "agent-sandbox",
    }
}

/// Requests a second and how many may come at once. Zero a second means no limit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RateLimit {
    pub per_second: f64,
    pub burst: u32,
}

impl RateLimit {
    pub const UNLIMITED: Self = Self { per_second: 0.0, burst: 0 };
}

#[derive(Clone, Debug, PartialEq, Default)]
pub struct ContainerResources {
    pub limits: BTreeMap<String, Quantity>,
    pub requests: BTreeMap<String, Quantity>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct KubernetesConfig {
    /// `None` means in-cluster.
    pub kubeconfig_path: Option<PathBuf>,
    pub insecure_skip_tls_verify: bool,
    pub namespace: Option<String>,
    pub workload_provider: WorkloadProvider,
    pub batchsandbox_template_file: Option<PathBuf>,
    pub sandbox_create_timeout: Duration,
    pub sandbox_create_poll_interval: Duration,
    pub pool_acquisition_timeout: Duration,
    pub image_pull_policy: String,
    pub execd_init_resources: ContainerResources,
    pub informer_resync: Duration,
    pub informer_watch_timeout: Duration,
    pub read: RateLimit,
    pub write: RateLimit,
    pub fastpath_endpoint: String,
    pub fastpath_timeout: Duration,
    pub fastpath_wait_ready: Duration,
    pub fastpath_resource_pool: String,
    pub template_s3_publish_secret: String,
}

impl Default for KubernetesConfig {
    fn default() -> Self {
        Self {
            kubeconfig_path: None,
            insecure_skip_tls_verify: false,
            namespace: None,
            workload_provider: WorkloadProvider::BatchSandbox,
            batchsandbox_template_file: None,
            sandbox_create_timeout: Duration::from_secs(60),
            sandbox_create_poll_interval: Duration::from_secs(1),
            pool_acquisition_timeout: Duration::from_secs(30),
            image_pull_policy: "IfNotPresent".to_owned(),
            execd_init_resources: ContainerResources::default(),
            informer_resync: Duration::from_secs(300),
            informer_watch_timeout: Duration::from_secs(60),
            read: RateLimit::UNLIMITED,
            write: RateLimit::UNLIMITED,
            fastpath_endpoint: "fast-sandbox-fastpath.opensandbox.svc:9090".to_owned(),
            fastpath_timeout: Duration::from_secs(30),
            fastpath_wait_ready: Duration::from_secs(30),
            fastpath_resource_pool: "default-pool".to_owned(),
            template_s3_publish_secret: "sandbox-oss-credentials".to_owned(),
        }
    }
}

impl ContainerResources {
    fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("limits", rules::resources(), &mut self.limits, "What it cannot exceed.");
        section.key("requests", rules::resources(), &mut self.requests, "What it is promised.");
    }
}

impl KubernetesConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "kubeconfig_path",
            Maybe(FilePath::any()),
            &mut self.kubeconfig_path,
            "Access to the cluster; unset is in-cluster.",
        );
        section.key(
            "insecure_skip_tls_verify",
            Flag,
            &mut self.insecure_skip_tls_verify,
            "Whether the API server's certificate is not checked.",
        );
        section.key("namespace", Maybe(Text::any()), &mut self.namespace, "Namespace of the sandboxes.");
        section.key(
            "workload_provider",
            Words::new(),
            &mut self.workload_provider,
            "The kind of object to create.",
        );
        section.key(
            "batchsandbox_template_file",
            Maybe(FilePath::any()),
            &mut self.batchsandbox_template_file,
            "Template of BatchSandbox objects.",
        );
        self.creation_keys(section);
        section.key(
            "informer_resync_seconds",
            Span::seconds(1),
            &mut self.informer_resync,
            "Time between two full listings.",
        );
        section.key(
            "informer_watch_timeout_seconds",
            Span::seconds(1),
            &mut self.informer_watch_timeout,
            "Time after which a watch is renewed.",
        );
        self.rate_keys(section);
        self.fast_keys(section);
    }

    fn creation_keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "sandbox_create_timeout_seconds",
            Span::seconds(1),
            &mut self.sandbox_create_timeout,
            "How long a sandbox may take to run.",
        );
        section.key(
            "sandbox_create_poll_interval_seconds",
            Span::positive_seconds(),
            &mut self.sandbox_create_poll_interval,
            "Time between two looks at a starting sandbox.",
        );
        section.key(
            "pool_acquisition_timeout_seconds",
            Span::seconds(1),
            &mut self.pool_acquisition_timeout,
            "How long to wait for room in a pool.",
        );
        section.key(
            "image_pull_policy",
            Text::any(),
            &mut self.image_pull_policy,
            "`Always`, `IfNotPresent` or `Never`.",
        );
        section.table(
            "execd_init_resources",
            "Resources of the init container that brings the agent.",
            &mut self.execd_init_resources,
            ContainerResources::keys,
        );
    }

    fn rate_keys(&mut self, section: &mut Section<'_, '_>) {
        let rate = || Float { min: 0.0 };
        section.key("read_qps", rate(), &mut self.read.per_second, "Most reads a second; 0 = no limit.");
        section.key("read_burst", Int::at_least(0), &mut self.read.burst, "Reads that may come at once.");
        section.key("write_qps", rate(), &mut self.write.per_second, "Most writes a second; 0 = no limit.");
        section.key("write_burst", Int::at_least(0), &mut self.write.burst, "Writes that may come at once.");
    }

    fn fast_keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "fastpath_endpoint",
            Text::non_empty(),
            &mut self.fastpath_endpoint,
            "Address of the fast sandbox service.",
        );
        section.key(
            "fastpath_timeout_seconds",
            Span::fractional_seconds(1),
            &mut self.fastpath_timeout,
            "How long one of its calls may take.",
        );
        section.key(
            "fastpath_wait_ready_seconds",
            Span::fractional_seconds(1),
            &mut self.fastpath_wait_ready,
            "How long a fast sandbox may take to be ready.",
        );
        section.key(
            "fastpath_resource_pool",
            Text::non_empty(),
            &mut self.fastpath_resource_pool,
            "Pool that fast sandboxes come from.",
        );
        section.key(
            "template_s3_publish_secret",
            Text::any(),
            &mut self.template_s3_publish_secret,
            "Name of the Secret with which templates are published.",
        );
    }
}
