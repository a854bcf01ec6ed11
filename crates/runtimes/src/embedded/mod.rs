//! The embedded runtime: boxes made by this machine's kernel, one shim process each, no daemon.
//!
//! Owns the state directory's `sandboxes/`, `bin/` and `network.json`. The shims own the boxes: this process may die and come back at any
//! time and finds them by their directories. Invariant: a directory is written (`spec.json`, `facts.json`) before its shim is started
//! and removed after everything else of the box is gone.

mod assign;
mod attach;
mod boxes;
mod capture;
mod control;
mod disk;
mod egress;
mod found_images;
mod network;
mod plan;
mod records;
mod runtime;
mod subnet;

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_images::{ImageStore, StoreOptions};
use sandglass_sandbox::ports::{RuntimeErrorKind, runtime::RuntimeError};
use sandglass_shim::Zygote;
pub use sandglass_shim::host_network::Subnet;

use boxes::Boxes;
pub use egress::EgressConfig;
use found_images::FoundImages;
use network::Network;

use crate::{
    binaries::{self, Binaries},
    host_paths::private_dir,
};

/// What the embedded runtime needs to know.
#[derive(Debug, Clone)]
pub struct EmbeddedConfig {
    pub state_dir: PathBuf,
    /// Whether the `host` image is offered.
    pub host_image: bool,
    /// `None`: a free one is chosen once and kept in the state directory.
    pub subnet: Option<Subnet>,
    /// Name servers of the boxes; empty: the host's own.
    pub dns: Vec<IpAddr>,
    /// Processes and threads of a box that asks for nothing else.
    pub pids_limit: u64,
    /// How long after its expiry a box ends by itself when no server does it.
    pub expiry_grace: Duration,
    /// Registries (`host[:port]`) spoken to without TLS, besides those on loopback addresses.
    pub insecure_registries: Vec<String>,
    /// How egress policies are enforced.
    pub egress: EgressConfig,
}

/// See the module documentation.
pub struct EmbeddedRuntime {
    shared: Arc<Shared>,
}

struct Shared {
    config: EmbeddedConfig,
    sandboxes: PathBuf,
    binaries: Binaries,
    images: Arc<ImageStore>,
    found: FoundImages,
    network: Network,
    boxes: Boxes,
    /// Ids whose directory is being filled or emptied right now; a full list skips them.
    busy: Mutex<HashMap<sandglass_sandbox::SandboxId, usize>>,
    zygote: Mutex<Arc<Zygote>>,
    /// Last, and thereby let go after the network: who gets the directory finds its subnet free.
    _lock: std::fs::File,
}

impl std::fmt::Debug for EmbeddedRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("EmbeddedRuntime")
            .field("state_dir", &self.shared.config.state_dir)
            .finish_non_exhaustive()
    }
}

impl EmbeddedRuntime {
    /// Takes the state directory into use: locks it, unpacks the agent and shim, prepares the network, starts the zygote.
    ///
    /// Call before the process has much memory or many threads; blocking.
    ///
    /// # Errors
    /// `Exists` when another server holds the directory; otherwise what the machine lacks, with the remedy.
    pub fn open(config: EmbeddedConfig) -> Result<Self, RuntimeError> {
        let failed = |what: &str, e: std::io::Error| {
            let kind = match e.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => RuntimeErrorKind::Exhausted,
                _ => RuntimeErrorKind::Failed,
            };
            RuntimeError::new(kind, "state-dir", format!("cannot {what}: {e}"))
        };
        let dir = &config.state_dir;
        private_dir(dir).map_err(|e| failed(&format!("create {}", dir.display()), e))?;
        let lock = lock(dir)?;
        let sandboxes = dir.join("sandboxes");
        private_dir(&sandboxes).map_err(|e| failed("create the sandboxes directory", e))?;
        let binaries = binaries::unpack(&dir.join("bin")).map_err(|e| failed("unpack the programs", e))?;
        let options = StoreOptions {
            insecure_registries: config.insecure_registries.clone(),
            ..StoreOptions::default()
        };
        let images = ImageStore::open_with(&dir.join("images"), options)
            .map_err(|e| RuntimeError::new(RuntimeErrorKind::Failed, "images", e.to_string()))?;
        let network = Network::open(&config)?;
        let zygote = Zygote::spawn(&binaries.shim).map_err(|e| failed("start the shim", e))?;
        Ok(Self {
            shared: Arc::new(Shared {
                sandboxes,
                binaries,
                images: Arc::new(images),
                found: FoundImages::default(),
                network,
                boxes: Boxes::default(),
                busy: Mutex::default(),
                zygote: Mutex::new(Arc::new(zygote)),
                config,
                _lock: lock,
            }),
        })
    }

    /// The local images.
    pub fn images(&self) -> &Arc<ImageStore> {
        &self.shared.images
    }

    /// Tells the digests of the images that some box is made from; these must not be removed.
    pub fn image_users(&self) -> impl Fn() -> BTreeSet<String> + Send + Sync + 'static {
        let shared = self.shared.clone();
        move || shared.boxes.image_ids()
    }

    /// Whether the `host` image is offered.
    pub fn offers_host_image(&self) -> bool {
        self.shared.config.host_image
    }

    /// Removes the host-side network of this state directory. Only when no box is left.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn remove_network(&self) -> Result<(), RuntimeError> {
        self.shared.network.remove()
    }
}

impl Drop for EmbeddedRuntime {
    /// The listeners hold the state directory; boxes and shims are left as they are.
    fn drop(&mut self) {
        for known in self.shared.boxes.lock().values_mut() {
            if let Some(listener) = known.listener.take() {
                listener.abort();
            }
        }
    }
}

impl Shared {
    fn busy(&self) -> MutexGuard<'_, HashMap<sandglass_sandbox::SandboxId, usize>> {
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn dir(&self, id: sandglass_sandbox::SandboxId) -> PathBuf {
        self.sandboxes.join(id.to_string())
    }

    /// The zygote, started again if it died.
    fn zygote(&self) -> std::io::Result<Arc<Zygote>> {
        let mut zygote = self.zygote.lock().unwrap_or_else(PoisonError::into_inner);
        if !zygote.is_alive() {
            tracing::warn!("the shim zygote is gone; starting another");
            *zygote = Arc::new(Zygote::spawn(&self.binaries.shim)?);
        }
        Ok(zygote.clone())
    }
}

fn lock(dir: &Path) -> Result<std::fs::File, RuntimeError> {
    let path = dir.join("lock");
    let file =
        std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(|e| {
            RuntimeError::new(
                RuntimeErrorKind::Failed,
                "state-dir",
                format!("cannot open {}: {e}", path.display()),
            )
        })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(std::fs::TryLockError::WouldBlock) => Err(RuntimeError::new(
            RuntimeErrorKind::Exists,
            "state-dir",
            format!("another server is using {}; stop it or set another [embedded] state_dir", dir.display()),
        )),
        Err(std::fs::TryLockError::Error(e)) => Err(RuntimeError::new(
            RuntimeErrorKind::Failed,
            "state-dir",
            format!("cannot lock {}: {e}", path.display()),
        )),
    }
}
