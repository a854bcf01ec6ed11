//! `[runtime]`: which backend runs the sandboxes.

use super::choice::choice;

choice! {
    RuntimeKind {
        /// Sandglass's own: namespaces and cgroups, no daemon.
        Embedded = "embedded",
        Docker = "docker",
        Kubernetes = "kubernetes",
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RuntimeConfig {
    pub kind: RuntimeKind,
    /// Always set for Docker and Kubernetes; the embedded runtime carries its own agent.
    pub execd_image: Option<String>,
    pub execd_run_as_init: bool,
}

impl Default for RuntimeConfig {
    fn default() -> Self {
        Self { kind: RuntimeKind::Embedded, execd_image: None, execd_run_as_init: false }
    }
}
