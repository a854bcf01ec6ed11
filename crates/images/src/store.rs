//! The store: records, references and what is done with them.
//!
//! Owns the layout of the directory (`references.json`, `images/<id>.json`, `layers/<diff id>/fs`, `tmp/`, `locks/`).
//! How layers get in is in `layers`, `import`, `pull` and `host_image`; how they get out in `collect`.
//!
//! Invariant: records and references change only with the index locked, and by renaming a complete file into place, so
//! readers need no lock and a second process may use the store at the same time.

use std::collections::{BTreeMap, HashSet};
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::error::ImageError;
use crate::image::{Image, ImageDigest};
use crate::limits::StoreOptions;
use crate::lock;
use crate::manifest::ParsedConfig;
use crate::reference::Reference;

/// The shortest start of an id that is looked up as one.
const MIN_ID_PREFIX: usize = 4;

/// A directory of unpacked layers and image records; cheap to clone.
#[derive(Clone, Debug)]
pub struct ImageStore {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) dir: PathBuf,
    pub(crate) options: StoreOptions,
}

/// `references.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Index {
    version: u32,
    pub(crate) references: BTreeMap<String, ReferenceEntry>,
}

/// Where a name leads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReferenceEntry {
    pub(crate) image: ImageDigest,
    /// Digests of the manifest and of the list it was chosen from, by which the image can be asked for as well.
    #[serde(default)]
    pub(crate) digests: Vec<ImageDigest>,
}

/// `images/<id>.json`. The configuration is kept to the byte, since its digest is the id.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) id: ImageDigest,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) grafts: Vec<(PathBuf, PathBuf)>,
    pub(crate) config: Box<RawValue>,
}

impl Record {
    /// Makes a record of a configuration's bytes.
    pub(crate) fn new(config: &[u8]) -> Result<Self, ImageError> {
        let bad = |e: &dyn std::fmt::Display| ImageError::Corrupt(format!("image configuration: {e}"));
        let text = std::str::from_utf8(config).map_err(|e| bad(&e))?;
        let raw = RawValue::from_string(text.trim().to_owned()).map_err(|e| bad(&e))?;
        Ok(Self { id: ImageDigest::of(config), grafts: Vec::new(), config: raw })
    }

    pub(crate) fn parse_config(&self) -> Result<ParsedConfig, ImageError> {
        ParsedConfig::parse(self.config.get().as_bytes())
    }
}

impl ImageStore {
    /// Opens the store in `dir`, making it if need be, and removes what crashed operations left there.
    pub fn open(dir: &Path) -> Result<Self, ImageError> {
        Self::open_with(dir, StoreOptions::default())
    }

    /// Opens the store with other limits.
    pub fn open_with(dir: &Path, options: StoreOptions) -> Result<Self, ImageError> {
        use std::os::unix::fs::DirBuilderExt as _;
        // Absolute, because layers are mounted by processes with other working directories.
        let dir =
            std::path::absolute(dir).map_err(|e| ImageError::io(format!("finding {}", dir.display()), e))?;
        // Closed to others: layers hold set-user-id programs of root.
        for sub in ["", "images", "layers", "tmp", "locks"] {
            let path = dir.join(sub);
            let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(&path);
            made.map_err(|e| ImageError::io(format!("making {}", path.display()), e))?;
        }
        let inner = Inner { dir, options };
        lock::remove_abandoned(&inner.tmp())?;
        lock::remove_unheld(&inner.dir.join("locks"))?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Finds an image in the store by `name[:tag]`, `name@digest`, id or the start of an id.
    pub fn resolve(&self, reference: &str) -> Result<Option<Image>, ImageError> {
        let index = self.inner.index()?;
        match self.inner.find(&index, reference)? {
            Some(found) => self.inner.load(&index, &found.image),
            None => Ok(None),
        }
    }

    /// Lists all images, also those without a name, sorted by name and id.
    pub fn list(&self) -> Result<Vec<Image>, ImageError> {
        let index = self.inner.index()?;
        let mut images = Vec::new();
        for id in self.inner.record_ids()? {
            match self.inner.load(&index, &id) {
                Ok(image) => images.extend(image),
                Err(error) => tracing::warn!(%id, %error, "an image record cannot be read"),
            }
        }
        images.sort_by(|a, b| {
            (a.references.is_empty(), &a.references, &a.id).cmp(&(
                b.references.is_empty(),
                &b.references,
                &b.id,
            ))
        });
        Ok(images)
    }
}

/// What a reference was found to mean.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) image: ImageDigest,
    /// The names it was found under; empty when it was found by id.
    pub(crate) names: Vec<String>,
}

impl Inner {
    pub(crate) fn tmp(&self) -> PathBuf {
        self.dir.join("tmp")
    }

    pub(crate) fn layer_dir(&self, diff_id: &ImageDigest) -> PathBuf {
        self.dir.join("layers").join(diff_id.hex())
    }

    pub(crate) fn lock_path(&self, name: &str) -> PathBuf {
        self.dir.join("locks").join(name)
    }

    pub(crate) fn record_path(&self, id: &ImageDigest) -> PathBuf {
        self.dir.join("images").join(format!("{}.json", id.hex()))
    }

    fn index_path(&self) -> PathBuf {
        self.dir.join("references.json")
    }

    pub(crate) fn index(&self) -> Result<Index, ImageError> {
        let path = self.index_path();
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map_err(|e| ImageError::Corrupt(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(Index { version: 1, ..Index::default() }),
            Err(e) => Err(ImageError::io(format!("reading {}", path.display()), e)),
        }
    }

    /// Runs `change` with the index locked against other threads and processes.
    pub(crate) fn locked<T>(&self, change: impl FnOnce() -> Result<T, ImageError>) -> Result<T, ImageError> {
        let _lock = lock::lock_permanent(&self.dir.join("lock"))?;
        change()
    }

    /// Replaces the index. To be called within [`Self::locked`].
    pub(crate) fn write_index(&self, index: &Index) -> Result<(), ImageError> {
        self.write_json(&self.index_path(), index)
    }

    pub(crate) fn write_json(&self, path: &Path, value: &impl Serialize) -> Result<(), ImageError> {
        let failed = |e: io::Error| ImageError::io(format!("writing {}", path.display()), e);
        let text = serde_json::to_vec_pretty(value).map_err(|e| failed(e.into()))?;
        let dir = path.parent().unwrap_or(&self.dir);
        let mut file = tempfile::NamedTempFile::new_in(dir).map_err(failed)?;
        file.write_all(&text).and_then(|()| file.write_all(b"\n")).map_err(failed)?;
        file.as_file().sync_all().map_err(failed)?;
        file.persist(path).map_err(|e| failed(e.error))?;
        File::open(dir).and_then(|d| d.sync_all()).map_err(failed)
    }

    /// Stores an image whose layers are in place, and lets `names` lead to it.
    pub(crate) fn publish(
        &self,
        record: &Record,
        names: &[Reference],
        digests: &[ImageDigest],
    ) -> Result<Image, ImageError> {
        self.locked(|| {
            self.write_json(&self.record_path(&record.id), record)?;
            let mut index = self.index()?;
            for name in names {
                let mut known = digests.to_vec();
                known.sort();
                known.dedup();
                let entry = ReferenceEntry { image: record.id.clone(), digests: known };
                index.references.insert(name.to_string(), entry);
            }
            if !names.is_empty() {
                self.write_index(&index)?;
            }
            self.load(&index, &record.id)?
                .ok_or_else(|| ImageError::corrupt("layers disappeared while their image was being stored"))
        })
    }

    pub(crate) fn record_ids(&self) -> Result<Vec<ImageDigest>, ImageError> {
        let failed = |e: io::Error| ImageError::io("reading the list of images", e);
        let mut ids = Vec::new();
        for entry in fs::read_dir(self.dir.join("images")).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            let hex = name.to_str().and_then(|n| n.strip_suffix(".json"));
            ids.extend(hex.and_then(|hex| format!("sha256:{hex}").parse::<ImageDigest>().ok()));
        }
        ids.sort();
        Ok(ids)
    }

    pub(crate) fn read_record(&self, id: &ImageDigest) -> Result<Option<Record>, ImageError> {
        let path = self.record_path(id);
        match fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text)
                .map(Some)
                .map_err(|e| ImageError::Corrupt(format!("{}: {e}", path.display()))),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(ImageError::io(format!("reading {}", path.display()), e)),
        }
    }

    /// Reads an image; nothing if it, or one of its layers, is not there.
    pub(crate) fn load(&self, index: &Index, id: &ImageDigest) -> Result<Option<Image>, ImageError> {
        let Some(record) = self.read_record(id)? else {
            return Ok(None);
        };
        let parsed = record.parse_config()?;
        let mut layers = Vec::new();
        let mut empty = None;
        let mut size_bytes = 0;
        let mut seen = HashSet::new();
        for diff_id in parsed.diff_ids.iter().rev() {
            // A layer that occurs twice is hidden by its upper occurrence, and overlayfs refuses to have it twice.
            if !seen.insert(diff_id) {
                continue;
            }
            let Some(facts) = self.layer_facts(diff_id)? else {
                tracing::warn!(%id, layer = %diff_id, "an image lacks a layer, and counts as absent");
                return Ok(None);
            };
            size_bytes += facts.size_bytes;
            let fs = self.layer_dir(diff_id).join("fs");
            if facts.entries == 0 {
                empty = Some(fs);
                continue;
            }
            layers.push(fs);
            if facts.opaque_root {
                break;
            }
        }
        if layers.is_empty() {
            layers.extend(empty);
        }
        let names = index.references.iter().filter(|(_, entry)| entry.image == *id);
        let familiar = |(name, _): (&String, _)| name.parse::<Reference>().ok().map(|r| r.familiar());
        Ok(Some(Image {
            id: record.id,
            references: names.filter_map(familiar).collect(),
            layers,
            config: parsed.config,
            size_bytes,
            created_at: parsed.created,
            platform: parsed.platform,
            grafts: record.grafts,
        }))
    }

    /// Finds out what a reference means here.
    pub(crate) fn find(&self, index: &Index, reference: &str) -> Result<Option<Found>, ImageError> {
        let by_name = reference.parse::<Reference>();
        if let Some(found) = by_name.as_ref().ok().and_then(|name| find_name(index, name)) {
            return Ok(Some(found));
        }
        let hex = reference.strip_prefix("sha256:").unwrap_or(reference);
        let is_prefix = (MIN_ID_PREFIX..=64).contains(&hex.len()) && crate::reference::is_hex(hex, hex.len());
        if !is_prefix {
            return by_name.map(|_| None);
        }
        let mut matches = self.record_ids()?.into_iter().filter(|id| id.hex().starts_with(hex));
        match (matches.next(), matches.next()) {
            (Some(image), None) => Ok(Some(Found { image, names: Vec::new() })),
            (None, _) => Ok(None),
            (Some(_), Some(_)) => Err(ImageError::InvalidReference {
                reference: reference.to_owned(),
                reason: "several images have an id that starts so".to_owned(),
            }),
        }
    }
}

fn find_name(index: &Index, name: &Reference) -> Option<Found> {
    if let Some(entry) = index.references.get(&name.to_string()) {
        return Some(Found { image: entry.image.clone(), names: vec![name.to_string()] });
    }
    // The same repository may have it under a tag.
    let digest = name.digest()?;
    let repository = name.name();
    let matches = |(key, entry): &(&String, &ReferenceEntry)| {
        let rest = key.strip_prefix(repository.as_str());
        rest.is_some_and(|rest| rest.starts_with([':', '@'])) && entry.digests.contains(digest)
    };
    let image = index.references.iter().find(matches)?.1.image.clone();
    let names = index.references.iter().filter(matches).filter(|(_, e)| e.image == image);
    Some(Found { names: names.map(|(key, _)| key.clone()).collect(), image })
}
