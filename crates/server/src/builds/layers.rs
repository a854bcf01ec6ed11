//! What costly instructions of Dockerfiles made, kept for later builds: an image for each chain of instructions, from a base up to one of them.
//!
//! One small file an image says that it is there, how large it is, and by its time when it was last used. The file is written first, so that no
//! image is forgotten; one without an image is removed. What is used least goes when all together are larger than they may be.

use std::{
    fs::{self, File},
    io,
    path::PathBuf,
    sync::Arc,
    time::SystemTime,
};

use sandglass_sandbox::{
    SandboxId,
    ports::{
        Captures, RuntimeErrorKind,
        captures::{LocalImage, RunConfig},
        runtime::RuntimeError,
    },
};
use sha2::{Digest, Sha256};
use tracing::{debug, warn};

/// Digits of a chain's key that its image is named by.
const DIGITS: usize = 40;

/// See the module documentation.
pub(super) struct Layers {
    folder: PathBuf,
    captures: Arc<dyn Captures>,
    /// Bytes that all of them may take.
    budget: u64,
}

/// The key of a chain: what it consisted of before, and one instruction more with everything that it depends on.
pub(super) fn chained(before: &str, parts: &[&str]) -> String {
    let mut digest = Sha256::new();
    for part in [before].iter().chain(parts) {
        digest.update((part.len() as u64).to_be_bytes());
        digest.update(part);
    }
    digest.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

fn name(key: &str) -> String {
    format!("osb-layer-{}", key.get(..DIGITS).unwrap_or(key))
}

fn of_disk(error: io::Error) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, "layer", error.to_string())
}

/// A kept image.
struct Kept {
    name: String,
    bytes: u64,
    used: SystemTime,
}

impl Layers {
    /// Blocking.
    pub(super) fn open(folder: PathBuf, captures: Arc<dyn Captures>, budget: u64) -> io::Result<Self> {
        fs::create_dir_all(&folder)?;
        Ok(Self { folder, captures, budget })
    }

    /// The image of the chain, if it is kept; it counts as used.
    pub(super) async fn find(&self, key: &str) -> Option<LocalImage> {
        let name = name(key);
        let file = File::options().write(true).open(self.folder.join(&name)).ok()?;
        let found = self.captures.find(&name).await.ok()??;
        let _ = file.set_modified(SystemTime::now());
        Some(found)
    }

    /// Keeps the sandbox's files as the image of the chain; the sandbox may be frozen afterwards. `below` is how large the image is that it was
    /// made of.
    pub(super) async fn keep(
        &self,
        key: &str,
        sandbox: SandboxId,
        config: &RunConfig,
        below: u64,
    ) -> Result<LocalImage, RuntimeError> {
        let name = name(key);
        let record = self.folder.join(&name);
        fs::write(&record, "0").map_err(of_disk)?;
        let image = self.captures.capture(sandbox, &name, config).await?.image;
        let bytes = image.size_bytes.saturating_sub(below);
        fs::write(&record, bytes.to_string()).map_err(of_disk)?;
        self.prune(Some(&name)).await;
        Ok(image)
    }

    fn kept(&self) -> io::Result<Vec<Kept>> {
        let mut all = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let bytes = fs::read_to_string(entry.path())?.trim().parse().unwrap_or(0);
            all.push(Kept { name, bytes, used: entry.metadata()?.modified()? });
        }
        all.sort_by_key(|layer| std::cmp::Reverse(layer.used));
        Ok(all)
    }

    /// Forgets what is not there any more, and removes what was not used for longest while all are too large. One that is in use stays.
    pub(super) async fn prune(&self, spare: Option<&str>) {
        let kept = match self.kept() {
            Ok(kept) => kept,
            Err(error) => return warn!(%error, "kept layers of builds could not be looked through"),
        };
        let mut taken = 0_u64;
        for layer in kept {
            let fits = taken.saturating_add(layer.bytes) <= self.budget || Some(layer.name.as_str()) == spare;
            let gone = match self.captures.find(&layer.name).await {
                Ok(Some(_)) if fits => false,
                Ok(Some(_)) => match self.captures.remove(&layer.name).await {
                    Ok(()) => true,
                    Err(error) => {
                        debug!(layer = layer.name, %error, "a kept layer is removed later");
                        false
                    }
                },
                // Perhaps it is being captured.
                Ok(None) => spare.is_none() || (Some(layer.name.as_str()) != spare && layer.bytes > 0),
                Err(_) => false,
            };
            if gone {
                let _ = fs::remove_file(self.folder.join(&layer.name));
            } else {
                taken = taken.saturating_add(layer.bytes);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeMap,
        sync::{Mutex, PoisonError},
        time::Duration,
    };

    use async_trait::async_trait;
    use sandglass_sandbox::ports::captures::Captured;

    use super::*;

    #[test]
    fn a_chain_is_told_apart_by_all_that_went_before() {
        let base = chained("", &["base", "sha256:1"]);
        assert_eq!(base, chained("", &["base", "sha256:1"]));
        let others =
            [chained("", &["bases", "ha256:1"]), chained("", &["base"]), chained("x", &["base", "sha256:1"])];
        assert!(others.iter().all(|other| *other != base));
        assert_eq!((base.len(), name(&base).len()), (64, 50));
    }

    /// Images of ten bytes more than those that they are made of.
    #[derive(Default)]
    struct Shelf {
        images: Mutex<BTreeMap<String, u64>>,
        in_use: Mutex<Option<String>>,
    }

    impl Shelf {
        fn names(&self) -> Vec<String> {
            self.images.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
        }
    }

    fn image(name: &str, size_bytes: u64) -> LocalImage {
        LocalImage {
            reference: name.into(),
            digest: "sha256:x".into(),
            size_bytes,
            config: RunConfig::default(),
        }
    }

    #[async_trait]
    impl Captures for Shelf {
        async fn capture(&self, _: SandboxId, name: &str, _: &RunConfig) -> Result<Captured, RuntimeError> {
            self.images.lock().unwrap().insert(name.to_owned(), 110);
            Ok(Captured { image: image(name, 110), left_out: Vec::new() })
        }

        async fn find(&self, name: &str) -> Result<Option<LocalImage>, RuntimeError> {
            Ok(self.images.lock().unwrap().get(name).map(|size| image(name, *size)))
        }

        async fn remove(&self, name: &str) -> Result<(), RuntimeError> {
            if self.in_use.lock().unwrap().as_deref() == Some(name) {
                return Err(RuntimeError::new(RuntimeErrorKind::InUse, "remove", "in use"));
            }
            self.images.lock().unwrap().remove(name);
            Ok(())
        }
    }

    #[tokio::test]
    async fn what_is_used_least_goes_when_there_is_too_much() {
        let dir = tempfile::tempdir().unwrap();
        let shelf = Arc::new(Shelf::default());
        let layers = Layers::open(dir.path().join("layers"), shelf.clone(), 25).unwrap();
        let used = |key: &str, ago: u64| {
            let file = File::options().write(true).open(dir.path().join("layers").join(name(key))).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(ago)).unwrap();
        };
        for (key, ago) in [("a", 300), ("b", 200)] {
            layers.keep(key, SandboxId::random(), &RunConfig::default(), 100).await.unwrap();
            used(key, ago);
        }
        assert!(layers.find("a").await.is_some() && layers.find("none").await.is_none());
        layers.keep("c", SandboxId::random(), &RunConfig::default(), 100).await.unwrap();
        assert_eq!(shelf.names(), [name("a"), name("c")], "the other one was used longer ago");
        // One that a box is made of stays until a later look.
        used("a", 100);
        *shelf.in_use.lock().unwrap() = Some(name("a"));
        layers.keep("d", SandboxId::random(), &RunConfig::default(), 100).await.unwrap();
        assert_eq!(shelf.names().len(), 3);
        *shelf.in_use.lock().unwrap() = None;
        layers.prune(None).await;
        assert_eq!(shelf.names(), [name("c"), name("d")]);
        // A server that ended before its capture left a record alone; another program removed an image.
        fs::write(dir.path().join("layers/osb-layer-half"), "0").unwrap();
        shelf.images.lock().unwrap().remove(&name("c"));
        layers.prune(None).await;
        assert_eq!(fs::read_dir(dir.path().join("layers")).unwrap().count(), 1);
        // Without a budget everything goes.
        Layers::open(dir.path().join("layers"), shelf.clone(), 0).unwrap().prune(None).await;
        assert!(shelf.names().is_empty());
    }
}
