//! `[agent_sandbox]`: the agent-sandbox workload provider on Kubernetes.

use std::path::PathBuf;

use super::choice::choice;

choice! {
    ShutdownPolicy { Delete = "Delete", Retain = "Retain" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct AgentSandboxConfig {
    pub template_file: Option<PathBuf>,
    pub shutdown_policy: ShutdownPolicy,
    pub ingress_enabled: bool,
}

impl Default for AgentSandboxConfig {
    fn default() -> Self {
        Self { template_file: None, shutdown_policy: ShutdownPolicy::Delete, ingress_enabled: true }
    }
}
