//! Which failures of a runtime count against the image of a sandbox: others are made of it too, and lose it when it is quarantined.

use sandglass_sandbox::{
    ports::{RuntimeErrorKind, runtime::RuntimeError},
    spec::{Entrypoint, Spec},
};

/// Whether the image is at fault, and not the request, the machine or the moment.
pub(super) fn blames_image(spec: &Spec, error: &RuntimeError) -> bool {
    // A disk that is full or an engine that is away is so for every image.
    if error.retryable() || error.kind == RuntimeErrorKind::Exhausted {
        return false;
    }
    match error.phase.as_str() {
        // Requests name no user: it is the one of the image's configuration.
        "image" | "user" => true,
        // What is mounted into the files of the image is of the request, as are places where it cannot be.
        "rootfs" => spec.volumes.is_empty(),
        "entrypoint" => spec.entrypoint == Entrypoint::Image,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn failed(kind: RuntimeErrorKind, phase: &str) -> RuntimeError {
        RuntimeError::new(kind, phase, "no")
    }

    #[test]
    fn an_image_is_not_blamed_for_the_entrypoint_of_a_request() {
        let error = failed(RuntimeErrorKind::Invalid, "entrypoint");
        let own = Spec::new("built:1", Entrypoint::Command(vec!["/none".into()]));
        assert!(!blames_image(&own, &error));
        assert!(!blames_image(&Spec::new("built:1", Entrypoint::AgentOnly), &error));
        assert!(blames_image(&Spec::new("built:1", Entrypoint::Image), &error));
    }

    #[test]
    fn an_image_is_blamed_for_what_it_brings_alone() {
        let spec = Spec::new("built:1", Entrypoint::AgentOnly);
        for phase in ["image", "user", "rootfs"] {
            assert!(blames_image(&spec, &failed(RuntimeErrorKind::Failed, phase)), "{phase}");
            for kind in [RuntimeErrorKind::Exhausted, RuntimeErrorKind::Unavailable] {
                assert!(!blames_image(&spec, &failed(kind, phase)), "{phase} {kind:?}");
            }
        }
        for phase in ["network", "cgroup", "agent", "start", "volume-host"] {
            assert!(!blames_image(&spec, &failed(RuntimeErrorKind::Failed, phase)), "{phase}");
        }
    }
}
