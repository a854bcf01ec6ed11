//! `[agent_sandbox]`: the agent-sandbox workload provider on Kubernetes.

use std::path::PathBuf;

use super::choice::choice;
use super::kinds::{FilePath, Flag, Maybe, Words};
use super::reader::Section;

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

impl AgentSandboxConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "template_file",
            Maybe(FilePath::any()),
            &mut self.template_file,
            "Template of the objects.",
        );
        section.key(
            "shutdown_policy",
            Words::new(),
            &mut self.shutdown_policy,
            "What an expired object becomes.",
        );
        section.key(
            "ingress_enabled",
            Flag,
            &mut self.ingress_enabled,
            "Whether sandboxes are reachable by ingress.",
        );
    }
}
