//! Pulls: from a reference to an image in the store.
//!
//! Invariant: a layer is downloaded and unpacked by one operation at a time, on this machine, whoever asks; the others
//! wait and find it done. A pull that is dropped stops its threads and leaves nothing.

use std::fs::File;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};

use crate::error::ImageError;
use crate::host_image::HOST_IMAGE;
use crate::image::{Credentials, Image, ImageDigest, Platform, ProgressFn, ProgressPhase};
use crate::import::{check_layers, layer_progress, overall};
use crate::layers::{LayerArchive, Watch};
use crate::lock::{FileLock, Pins, Workspace};
use crate::manifest::{Descriptor, Document, Manifest, check_layer_type};
use crate::reference::Reference;
use crate::registry::Registry;
use crate::store::{ImageStore, Record};

/// Layers fetched at the same time.
const CONCURRENT_LAYERS: usize = 3;

impl ImageStore {
    /// Pulls an image for `platform` (the host's if none is given), or finds that it is here already.
    ///
    /// The registry is asked in any case, since a tag may have moved. Layers that are here are not fetched again.
    pub async fn pull(
        &self,
        reference: &str,
        auth: Option<Credentials>,
        platform: Option<Platform>,
        progress: ProgressFn<'_>,
    ) -> Result<Image, ImageError> {
        let reference: Reference = reference.parse()?;
        if reference == HOST_IMAGE.parse()? {
            let store = self.clone();
            return blocking(move || store.ensure_host_image()).await;
        }
        progress(overall(ProgressPhase::Resolving, 0));
        let registry = Registry::new(&reference, auth, &self.inner.options.insecure_registries)?;
        registry.log_in().await?;
        let (manifest, digests) = choose_manifest(&registry, &platform.unwrap_or_default()).await?;
        manifest.layers.iter().try_for_each(|layer| check_layer_type(&layer.media_type))?;
        let record = Record::new(&registry.document(&manifest.config).await?)?;
        let parsed = record.parse_config()?;
        check_layers(&parsed, manifest.layers.len())?;

        let inner = Arc::clone(&self.inner);
        let pins = Pins { layers: parsed.diff_ids.clone() };
        let workspace = blocking(move || {
            let workspace = Workspace::create(&inner.tmp())?;
            inner.locked(|| workspace.pin(&pins))?;
            Ok(Arc::new(workspace))
        })
        .await?;
        let fetch = Fetch {
            store: self,
            registry: &registry,
            workspace: &workspace,
            progress,
            layers: manifest.layers.len(),
            cancelled: CancelOnDrop::default(),
        };
        // Collected first: a stream that held the closure could not be sent between threads.
        let fetches: Vec<_> = manifest
            .layers
            .iter()
            .zip(&parsed.diff_ids)
            .map(|(layer, diff_id)| fetch.layer(layer, diff_id))
            .collect();
        let fetched = stream::iter(fetches).buffer_unordered(CONCURRENT_LAYERS).try_collect::<()>().await;
        drop(fetch);
        if let Err(error) = fetched {
            // Deleting what was downloaded may take a while.
            blocking(move || {
                drop(workspace);
                Ok(())
            })
            .await?;
            return Err(error);
        }
        let layers = manifest.layers.len();
        let inner = Arc::clone(&self.inner);
        let image = blocking(move || {
            let image = inner.publish(&record, &[reference], &digests);
            drop(workspace);
            image
        })
        .await?;
        progress(overall(ProgressPhase::Done, layers));
        Ok(image)
    }
}

/// Follows lists to the manifest for a platform; returns the digests it can be asked for by.
async fn choose_manifest(
    registry: &Registry,
    platform: &Platform,
) -> Result<(Manifest, Vec<ImageDigest>), ImageError> {
    let (mut bytes, digest) = registry.manifest().await?;
    let mut digests = vec![digest];
    // A list in a list is as deep as tools go.
    for _ in 0..3 {
        let chosen = match Document::parse(&bytes)? {
            Document::Manifest(manifest) => return Ok((manifest, digests)),
            Document::Index(index) => index.choose(platform)?.digest.clone(),
        };
        bytes = registry.manifest_by_digest(&chosen).await?;
        digests.push(chosen);
    }
    Err(ImageError::corrupt("manifest lists nested too deeply"))
}

/// What fetching the layers of one image shares.
struct Fetch<'a> {
    store: &'a ImageStore,
    registry: &'a Registry,
    workspace: &'a Arc<Workspace>,
    progress: ProgressFn<'a>,
    layers: usize,
    cancelled: CancelOnDrop,
}

impl Fetch<'_> {
    async fn layer(&self, descriptor: &Descriptor, diff_id: &ImageDigest) -> Result<(), ImageError> {
        let inner = &self.store.inner;
        let report = |phase, current| {
            (self.progress)(layer_progress(
                phase,
                &descriptor.digest,
                (current, descriptor.size),
                self.layers,
            ));
        };
        let lock = FileLock::acquire(&inner.layer_lock(diff_id)).await?;
        if !inner.has_layer(diff_id) {
            let path = self.workspace.path().join(format!("blob-{}", diff_id.hex()));
            report(ProgressPhase::Downloading, 0);
            let downloaded = |bytes| report(ProgressPhase::Downloading, bytes);
            self.registry.download(descriptor, &path, &downloaded).await?;
            self.unpack(path, diff_id, lock, &|bytes| report(ProgressPhase::Unpacking, bytes)).await?;
        }
        report(ProgressPhase::Done, descriptor.size);
        Ok(())
    }

    /// Unpacks on a thread that may block. The lock and the workspace go with it, for they must outlive a dropped pull
    /// as long as the thread is still writing.
    async fn unpack(
        &self,
        path: std::path::PathBuf,
        diff_id: &ImageDigest,
        lock: FileLock,
        report: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<(), ImageError> {
        let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
        let (inner, workspace) = (Arc::clone(&self.store.inner), Arc::clone(self.workspace));
        let (diff_id, cancelled) = (diff_id.clone(), Arc::clone(&self.cancelled.0));
        let work = tokio::task::spawn_blocking(move || {
            let failed = |e| ImageError::io("reading a downloaded layer", e);
            let file = File::open(&path).map_err(failed)?;
            let length = file.metadata().map_err(failed)?.len();
            let archive = LayerArchive { data: Box::new(file), length };
            // Nobody listens any more when the pull was dropped.
            let report = move |bytes| sender.send(bytes).unwrap_or_default();
            let watch = Watch { report: &report, cancelled: &cancelled };
            let layer = inner.unpack_layer(&workspace, archive, Some(&diff_id), &watch)?;
            inner.place_layer(layer)?;
            std::fs::remove_file(&path).map_err(|e| ImageError::io("removing a downloaded layer", e))?;
            drop((workspace, lock));
            Ok(())
        });
        // Ends when the thread drops the sender, so before the join.
        while let Some(bytes) = receiver.recv().await {
            report(bytes);
        }
        work.await.map_err(|e| ImageError::io("unpacking a layer", std::io::Error::other(e)))?
    }
}

/// Tells the unpacking threads to stop when the pull is dropped or has failed.
#[derive(Default)]
struct CancelOnDrop(Arc<AtomicBool>);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ImageError> + Send + 'static,
) -> Result<T, ImageError> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|e| ImageError::io("running image work", std::io::Error::other(e)))?
}
