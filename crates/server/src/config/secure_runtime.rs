//! `[secure_runtime]`: a stronger isolation boundary than plain containers.

use super::choice::choice;
use super::kinds::{Maybe, Text, Words};
use super::reader::Section;

choice! {
    SecureRuntimeKind { None = "", Gvisor = "gvisor", Kata = "kata", Firecracker = "firecracker" }
}

#[derive(Clone, Debug, PartialEq)]
pub struct SecureRuntimeConfig {
    pub kind: SecureRuntimeKind,
    pub docker_runtime: Option<String>,
    pub k8s_runtime_class: Option<String>,
}

impl Default for SecureRuntimeConfig {
    fn default() -> Self {
        Self { kind: SecureRuntimeKind::None, docker_runtime: None, k8s_runtime_class: None }
    }
}

impl SecureRuntimeConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "type",
            Words::new(),
            &mut self.kind,
            "The boundary; empty is none beyond the runtime's own.",
        );
        section.key(
            "docker_runtime",
            Maybe(Text::any()),
            &mut self.docker_runtime,
            "Name of the Docker runtime.",
        );
        section.key(
            "k8s_runtime_class",
            Maybe(Text::any()),
            &mut self.k8s_runtime_class,
            "Name of the Kubernetes RuntimeClass.",
        );
    }
}
