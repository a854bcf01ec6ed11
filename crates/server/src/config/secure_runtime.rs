//! `[secure_runtime]`: a stronger isolation boundary than plain containers.

use super::choice::choice;

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
