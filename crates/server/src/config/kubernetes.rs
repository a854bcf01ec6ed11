//! `[kubernetes]`: the Kubernetes backend.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use super::choice::choice;
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
