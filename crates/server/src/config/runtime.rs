//! `[runtime]`: which backend runs the sandboxes.

use super::choice::choice;
use super::kinds::{Flag, Maybe, Text, Words};
use super::reader::Section;

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

impl RuntimeConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key("type", Words::new(), &mut self.kind, "The backend that runs the sandboxes.");
        section.key(
            "execd_image",
            Maybe(Text::any()),
            &mut self.execd_image,
            "Image that holds the agent. Required for kubernetes; elsewhere the server brings its own, and only Windows guests use this.",
        );
        section.key(
            "execd_run_as_init",
            Flag,
            &mut self.execd_run_as_init,
            "Whether the agent is PID 1 of the container. With the embedded runtime it always is.",
        );
    }
}
