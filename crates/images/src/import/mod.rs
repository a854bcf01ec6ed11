//! Imports: images that come from files instead of a registry.
//!
//! Owns telling apart OCI layouts, `docker save` archives and plain root file systems, and what each says about names.
//! Invariant: an import makes its images visible one by one, each only when all its layers are in place.

mod source;

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use serde::Deserialize;

use crate::error::ImageError;
use crate::image::{Image, ImageDigest, Platform, Progress, ProgressFn, ProgressPhase};
use crate::layers::{LayerArchive, Watch, read_document};
use crate::lock::{FileLock, Pins, Workspace};
use crate::manifest::{Descriptor, Document, Index, MAX_DOCUMENT, Manifest, ParsedConfig, check_layer_type};
use crate::reference::Reference;
use crate::store::{ImageStore, Record};
use source::{Contents, Source};

const NAME_ANNOTATIONS: [&str; 2] = ["io.containerd.image.name", "org.opencontainers.image.ref.name"];
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// An image found in a file, not yet unpacked.
struct FoundImage {
    config: Vec<u8>,
    /// Names of the layers' archives in the source, the lowest first.
    layers: Vec<String>,
    names: Vec<Reference>,
    digests: Vec<ImageDigest>,
}

/// One element of `manifest.json` in a `docker save` archive.
#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SavedImage {
    config: String,
    repo_tags: Option<Vec<String>>,
    layers: Option<Vec<String>>,
}

impl ImageStore {
    /// Imports every image in a file or directory; blocks the thread.
    ///
    /// Takes an OCI layout (directory or tar), a `docker save` archive or a plain root file system, compressed or not,
    /// and tells them apart by content. `name` replaces the names a single image has.
    pub fn import(
        &self,
        path: &Path,
        name: Option<&str>,
        progress: ProgressFn<'_>,
    ) -> Result<Vec<Image>, ImageError> {
        let name = name.map(str::parse::<Reference>).transpose()?;
        let workspace = Workspace::create(&self.inner.tmp())?;
        progress(overall(ProgressPhase::Resolving, 0));
        let mut found = match source::open(path, &workspace, &self.inner.options.limits)? {
            Contents::RootFilesystem => {
                let image = self.import_root(path, name, &workspace, progress)?;
                progress(overall(ProgressPhase::Done, 1));
                return Ok(vec![image]);
            }
            Contents::Images(source) => (find_images(&source)?, source),
        };
        match (name, found.0.as_mut_slice()) {
            (_, []) => {
                return Err(ImageError::Unsupported("the archive holds no image for this host".to_owned()));
            }
            (Some(name), [only]) => only.names = vec![name],
            (Some(_), several) => {
                let count = several.len();
                return Err(ImageError::Unsupported(format!(
                    "one name for the {count} images of an archive"
                )));
            }
            (None, _) => {}
        }
        let (images, source) = found;
        let layers = images.iter().map(|image| image.layers.len()).sum();
        let imported = images
            .into_iter()
            .map(|image| self.install(&source, image, &workspace, progress))
            .collect::<Result<_, _>>()?;
        progress(overall(ProgressPhase::Done, layers));
        Ok(imported)
    }

    fn install(
        &self,
        source: &Source,
        found: FoundImage,
        workspace: &Workspace,
        progress: ProgressFn<'_>,
    ) -> Result<Image, ImageError> {
        let record = Record::new(&found.config)?;
        let parsed = record.parse_config()?;
        check_layers(&parsed, found.layers.len())?;
        self.inner.locked(|| workspace.pin(&Pins { layers: parsed.diff_ids.clone() }))?;
        let layers = found.layers.len();
        for (diff_id, name) in parsed.diff_ids.iter().zip(&found.layers) {
            let _lock = FileLock::acquire_blocking(&self.inner.layer_lock(diff_id))?;
            if !self.inner.has_layer(diff_id) {
                let archive = source.blob(name)?;
                let length = archive.length;
                let report = |current| {
                    progress(layer_progress(ProgressPhase::Unpacking, diff_id, (current, length), layers));
                };
                let watch = Watch { report: &report, cancelled: &AtomicBool::new(false) };
                let layer = self.inner.unpack_layer(workspace, archive, Some(diff_id), &watch)?;
                self.inner.place_layer(layer)?;
            }
            progress(layer_progress(ProgressPhase::Done, diff_id, (0, 0), layers));
        }
        self.inner.publish(&record, &found.names, &found.digests)
    }

    fn import_root(
        &self,
        path: &Path,
        name: Option<Reference>,
        workspace: &Workspace,
        progress: ProgressFn<'_>,
    ) -> Result<Image, ImageError> {
        let failed = |e| ImageError::io(format!("reading {}", path.display()), e);
        let file = File::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let config = |diff_id: &ImageDigest| {
            let host = Platform::default();
            let config = serde_json::json!({
                "architecture": host.arch, "os": host.os, "config": { "Env": [DEFAULT_PATH] },
                "rootfs": { "type": "layers", "diff_ids": [diff_id] },
            });
            Record::new(config.to_string().as_bytes())
        };
        let report = |current| {
            progress(Progress {
                phase: ProgressPhase::Unpacking,
                layer: None,
                current,
                total: Some(length),
                layers: 1,
            });
        };
        let archive = LayerArchive { data: Box::new(file), length };
        self.install_single_layer(archive, config, name.as_slice(), workspace, &report)
    }

    /// Makes an image of one layer, whose digest is known only after it was unpacked.
    pub(crate) fn install_single_layer(
        &self,
        archive: LayerArchive,
        record: impl FnOnce(&ImageDigest) -> Result<Record, ImageError>,
        names: &[Reference],
        workspace: &Workspace,
        report: &(dyn Fn(u64) + Send + Sync),
    ) -> Result<Image, ImageError> {
        let watch = Watch { report, cancelled: &AtomicBool::new(false) };
        let layer = self.inner.unpack_layer(workspace, archive, None, &watch)?;
        let record = record(&layer.diff_id)?;
        self.inner.locked(|| workspace.pin(&Pins { layers: vec![layer.diff_id.clone()] }))?;
        self.inner.place_layer(layer)?;
        self.inner.publish(&record, names, &[])
    }
}

pub(crate) fn check_layers(parsed: &ParsedConfig, given: usize) -> Result<(), ImageError> {
    let named = parsed.diff_ids.len();
    if named != given {
        return Err(ImageError::Corrupt(format!(
            "the configuration names {named} layers, the manifest {given}"
        )));
    }
    if named == 0 {
        return Err(ImageError::Unsupported("an image without layers".to_owned()));
    }
    Ok(())
}

pub(crate) fn overall(phase: ProgressPhase, layers: usize) -> Progress {
    Progress { phase, layer: None, current: 0, total: None, layers }
}

/// Progress of one layer; `(done, total)` are zero when nothing had to be done.
pub(crate) fn layer_progress(
    phase: ProgressPhase,
    layer: &ImageDigest,
    (current, total): (u64, u64),
    layers: usize,
) -> Progress {
    Progress { phase, layer: Some(layer.clone()), current, total: Some(total), layers }
}

fn find_images(source: &Source) -> Result<Vec<FoundImage>, ImageError> {
    let saved: Option<Vec<SavedImage>> = match source.document("manifest.json")? {
        Some(text) => Some(
            serde_json::from_slice(&text).map_err(|e| ImageError::Corrupt(format!("manifest.json: {e}")))?,
        ),
        None => None,
    };
    match source.document("index.json")? {
        Some(text) => find_in_layout(source, &text, saved.as_deref().unwrap_or_default()),
        None => saved.unwrap_or_default().into_iter().map(|image| find_saved(source, image)).collect(),
    }
}

fn find_saved(source: &Source, image: SavedImage) -> Result<FoundImage, ImageError> {
    let config = source.required_document(&image.config)?;
    Ok(FoundImage {
        config,
        layers: image.layers.unwrap_or_default(),
        names: image.repo_tags.unwrap_or_default().iter().filter_map(|tag| usable_name(tag)).collect(),
        digests: Vec::new(),
    })
}

/// Names in archives are hints: one that is none is left out, since the image itself is good.
fn usable_name(name: &str) -> Option<Reference> {
    let parsed = name.parse().ok();
    if parsed.is_none() {
        tracing::warn!(name, "an archive gives its image a name that is none");
    }
    parsed
}

fn find_in_layout(source: &Source, text: &[u8], saved: &[SavedImage]) -> Result<Vec<FoundImage>, ImageError> {
    let Document::Index(index) = Document::parse(text)? else {
        return Err(ImageError::corrupt("index.json is not an index"));
    };
    let host = Platform::default();
    let mut found: Vec<FoundImage> = Vec::new();
    for group in groups(&index) {
        // A group is one image for several platforms, or one image.
        let descriptor = match group.as_slice() {
            [only] => only,
            _ => match (Index { manifests: group.clone() }).choose(&host) {
                Ok(chosen) => &chosen.clone(),
                Err(_) => continue,
            },
        };
        let Some((manifest, digests)) = layout_manifest(source, descriptor, &host)? else { continue };
        for layer in &manifest.layers {
            check_layer_type(&layer.media_type)?;
        }
        let config = verified(source, &manifest.config.digest)?;
        let config_path = blob_path(&manifest.config.digest);
        let mut names: Vec<Reference> = annotated_name(descriptor).into_iter().collect();
        let tags =
            saved.iter().filter(|image| image.config == config_path).filter_map(|i| i.repo_tags.as_ref());
        names.extend(tags.flatten().filter_map(|tag| usable_name(tag)));
        names.sort();
        names.dedup();
        let layers = manifest.layers.iter().map(|layer| blob_path(&layer.digest)).collect();
        match found.iter_mut().find(|other| other.config == config) {
            Some(same) => same.names.extend(names),
            None => found.push(FoundImage { config, layers, names, digests }),
        }
    }
    Ok(found)
}

/// Groups the manifests of an index by the name they carry.
fn groups(index: &Index) -> Vec<Vec<Descriptor>> {
    let mut groups: Vec<(Option<String>, Vec<Descriptor>)> = Vec::new();
    for descriptor in &index.manifests {
        if descriptor.annotations.contains_key("vnd.docker.reference.type") {
            // An attestation, which is no image.
            continue;
        }
        let name = NAME_ANNOTATIONS.iter().find_map(|key| descriptor.annotations.get(*key)).cloned();
        match groups.iter_mut().find(|(other, _)| *other == name) {
            Some((_, group)) => group.push(descriptor.clone()),
            None => groups.push((name, vec![descriptor.clone()])),
        }
    }
    groups.into_iter().map(|(_, group)| group).collect()
}

fn annotated_name(descriptor: &Descriptor) -> Option<Reference> {
    let [full, short] = NAME_ANNOTATIONS.map(|key| descriptor.annotations.get(key));
    match (full, short) {
        (Some(full), _) => usable_name(full),
        // The specification has just a tag here, which names nothing by itself; several tools write a whole name.
        (None, Some(short)) if short.contains(['/', ':']) => usable_name(short),
        _ => None,
    }
}

/// Follows a descriptor to a manifest for `host`; nothing if there is none for it.
fn layout_manifest(
    source: &Source,
    descriptor: &Descriptor,
    host: &Platform,
) -> Result<Option<(Manifest, Vec<ImageDigest>)>, ImageError> {
    let mut digest = descriptor.digest.clone();
    let mut digests = vec![digest.clone()];
    // An index in an index is as deep as tools go.
    for _ in 0..3 {
        match Document::parse(&verified(source, &digest)?)? {
            Document::Manifest(manifest) => return Ok(Some((manifest, digests))),
            Document::Index(index) => digest = index.choose(host)?.digest.clone(),
        }
        digests.push(digest.clone());
    }
    Err(ImageError::corrupt("indexes nested too deeply"))
}

fn verified(source: &Source, digest: &ImageDigest) -> Result<Vec<u8>, ImageError> {
    let bytes = source.required_document(&blob_path(digest))?;
    if ImageDigest::of(&bytes) == *digest {
        Ok(bytes)
    } else {
        Err(ImageError::Corrupt(format!("blob {digest} has other content")))
    }
}

fn blob_path(digest: &ImageDigest) -> String {
    format!("blobs/sha256/{}", digest.hex())
}

impl Source {
    fn document(&self, name: &str) -> Result<Option<Vec<u8>>, ImageError> {
        self.open_blob(name)?.map(|blob| read_document(BufReader::new(blob.data), MAX_DOCUMENT)).transpose()
    }

    fn required_document(&self, name: &str) -> Result<Vec<u8>, ImageError> {
        read_document(BufReader::new(self.blob(name)?.data), MAX_DOCUMENT)
    }

    fn blob(&self, name: &str) -> Result<LayerArchive, ImageError> {
        self.open_blob(name)?.ok_or_else(|| {
            let shown: String = name.chars().take(200).collect();
            ImageError::Corrupt(format!("the archive lacks {shown:?}"))
        })
    }
}
