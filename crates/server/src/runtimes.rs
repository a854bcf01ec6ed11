//! From the configuration to a runtime: which one, and with what settings.
//!
//! The only place where a configuration section becomes a backend's own settings.

use std::{path::Path, sync::Arc};

use sandglass_runtimes::embedded::{EmbeddedConfig, EmbeddedRuntime, Subnet};
use sandglass_sandbox::ports::{Runtime, runtime::RuntimeError};
use tracing::warn;

use crate::{
    config::{Config, RuntimeKind, SubnetChoice},
    engine::Settings,
    http::images::Images,
};

/// Why there is no runtime to serve with. Each says what to do about it.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("runtime.type = \"{0}\" is not available in this version; use \"embedded\" or \"docker\"")]
    Unsupported(&'static str),
    #[error("the {runtime} runtime cannot start, failed in phase {}: {}", .error.phase, .error.message)]
    Failed { runtime: &'static str, error: RuntimeError },
}

/// A runtime that is ready for use.
pub struct Opened {
    pub runtime: Arc<dyn Runtime>,
    /// Where the runtime keeps images of its own.
    pub images: Option<Images>,
    backend: Backend,
}

enum Backend {
    Embedded(Arc<EmbeddedRuntime>),
}

impl std::fmt::Debug for Opened {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Opened").field("runtime", &self.runtime.name()).finish_non_exhaustive()
    }
}

/// Opens the configured runtime. Blocking.
///
/// # Errors
/// When this version lacks it, or the machine or its state directory is not fit.
pub fn open(config: &Config) -> Result<Opened, OpenError> {
    let failed = |runtime| move |error| OpenError::Failed { runtime, error };
    match config.runtime.kind {
        RuntimeKind::Embedded => {
            let runtime = Arc::new(EmbeddedRuntime::open(embedded(config)).map_err(failed("embedded"))?);
            let images = images(&runtime, &config.embedded.state_dir);
            Ok(Opened { runtime: runtime.clone(), images: Some(images), backend: Backend::Embedded(runtime) })
        }
        RuntimeKind::Docker => Err(OpenError::Unsupported("docker")),
        RuntimeKind::Kubernetes => Err(OpenError::Unsupported("kubernetes")),
    }
}

impl Opened {
    /// What the engine works by on this runtime.
    #[must_use]
    pub fn settings(&self, config: &Config) -> Settings {
        match self.backend {
            Backend::Embedded(_) => Settings {
                create_grace: config.embedded.create_grace,
                max_sandboxes: config.embedded.max_sandboxes.unwrap_or(0),
                ..Settings::default()
            },
        }
    }

    /// What only a runtime that answers can tell. One that does not answer is no reason not to serve.
    ///
    /// # Errors
    /// When the runtime lacks what the configuration asks of it.
    pub async fn check(&self) -> Result<(), OpenError> {
        Ok(())
    }

    /// Tidies up what only running sandboxes need, when there are none.
    pub fn leave(&self) {
        let Backend::Embedded(runtime) = &self.backend;
        if let Err(error) = runtime.remove_network() {
            warn!(%error, "the host-side network could not be removed");
        }
    }
}

fn embedded(config: &Config) -> EmbeddedConfig {
    let embedded = &config.embedded;
    EmbeddedConfig {
        state_dir: embedded.state_dir.clone(),
        host_image: config.offers_host_image(),
        subnet: match embedded.subnet {
            SubnetChoice::Auto => None,
            SubnetChoice::Fixed(net) => Some(Subnet { address: net.address(), prefix_len: net.prefix() }),
        },
        dns: embedded.dns.clone(),
        pids_limit: embedded.pids_limit,
        expiry_grace: embedded.expiry_grace,
        insecure_registries: embedded.insecure_registries.clone(),
    }
}

fn images(runtime: &EmbeddedRuntime, state_dir: &Path) -> Images {
    let uploads = state_dir.join("uploads");
    // What a killed server left half uploaded is of no use.
    let _ = std::fs::remove_dir_all(&uploads);
    if let Err(error) = std::fs::create_dir_all(&uploads) {
        warn!(%error, "there is no room for image uploads");
    }
    Images { store: runtime.images().clone(), uploads, in_use: Arc::new(runtime.image_users()) }
}
