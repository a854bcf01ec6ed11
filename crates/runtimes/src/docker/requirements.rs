//! What the engine must have before boxes can be made on it as configured.

use std::collections::HashMap;

use sandglass_sandbox::ports::runtime::RuntimeError;

use super::{DockerRuntime, errors::invalid};

impl DockerRuntime {
    /// Whether the engine knows the runtime that boxes are to run on.
    ///
    /// # Errors
    /// `Unavailable` when the engine does not answer, `Invalid` when it lacks the runtime.
    pub async fn check(&self) -> Result<(), RuntimeError> {
        let Some(wanted) = &self.shared.config.secure_runtime else { return Ok(()) };
        let info = self.shared.client.call(|engine| async move { engine.info().await }).await;
        let known = info.map_err(|failure| failure.during("secure-runtime"))?.runtimes.unwrap_or_default();
        has(&known, wanted)
    }
}

impl DockerRuntime {
    /// What a person wants to know about the engine before anything is tried on it, in a few words.
    ///
    /// # Errors
    /// `Unavailable` when the engine does not answer.
    pub async fn about(&self) -> Result<String, RuntimeError> {
        let info = self.shared.client.call(|engine| async move { engine.info().await }).await;
        let info = info.map_err(|failure| failure.during("engine"))?;
        let known = info.runtimes.unwrap_or_default();
        let mut runtimes: Vec<&str> = known.keys().map(String::as_str).collect();
        runtimes.sort_unstable();
        let text = |value: Option<String>| value.filter(|v| !v.is_empty()).unwrap_or_else(|| "?".to_owned());
        Ok(format!(
            "{} at {}, {}/{}, runtimes {}",
            text(info.server_version),
            self.shared.config.engine,
            text(info.os_type),
            text(info.architecture),
            runtimes.join(" "),
        ))
    }
}

fn has<T>(known: &HashMap<String, T>, wanted: &str) -> Result<(), RuntimeError> {
    if known.contains_key(wanted) {
        return Ok(());
    }
    let mut names: Vec<&str> = known.keys().map(String::as_str).collect();
    names.sort_unstable();
    Err(invalid(
        "secure-runtime",
        format!(
            "the engine has no runtime {wanted:?}, which [secure_runtime] asks for; it has: {}. Add it to the \
             engine's configuration (\"runtimes\" in daemon.json) or name another one in docker_runtime",
            names.join(", ")
        ),
    ))
}

#[cfg(test)]
mod tests {
    use sandglass_sandbox::ports::RuntimeErrorKind;

    use super::*;

    #[test]
    fn a_runtime_that_the_engine_lacks_is_named_beside_those_it_has() {
        let known = HashMap::from([("runc".to_owned(), ()), ("io.containerd.runc.v2".to_owned(), ())]);
        assert!(has(&known, "runc").is_ok());
        let lacking = has(&known, "runsc").unwrap_err();
        assert_eq!((lacking.kind, lacking.phase.as_str()), (RuntimeErrorKind::Invalid, "secure-runtime"));
        assert!(lacking.message.contains("io.containerd.runc.v2, runc"), "{}", lacking.message);
    }
}
