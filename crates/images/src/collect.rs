//! Removal of images and of what no image needs.
//!
//! Invariant: with the index locked, a layer goes only when no record names it and no running operation has pinned it.
//! It leaves its place by a rename; the files are deleted after the lock is given up.

use std::collections::HashSet;
use std::fs;
use std::io;

use crate::error::ImageError;
use crate::image::{Collected, ImageDigest};
use crate::lock::{self, Workspace};
use crate::store::{ImageStore, Index, Inner};

impl ImageStore {
    /// Removes a name, and with the last one the image and the layers only it had.
    ///
    /// Given an id, removes all names. Refuses while `in_use` says so, unless the image keeps another name. `in_use` is
    /// called with the store locked: it must not call the store, and must already count sandboxes being created.
    pub fn remove(
        &self,
        reference: &str,
        in_use: &dyn Fn(&ImageDigest) -> bool,
    ) -> Result<Collected, ImageError> {
        let inner = &self.inner;
        let trash = Workspace::create(&inner.tmp())?;
        inner.locked(|| {
            let mut index = inner.index()?;
            let found = inner.find(&index, reference)?.ok_or_else(|| ImageError::NotFound {
                reference: reference.to_owned(),
                place: "in the store".to_owned(),
            })?;
            let by_id = found.names.is_empty();
            let goes = |name: &String| by_id || found.names.contains(name);
            let stays =
                index.references.iter().any(|(name, entry)| entry.image == found.image && !goes(name));
            if !stays && in_use(&found.image) {
                return Err(ImageError::InUse { reference: reference.to_owned() });
            }
            index.references.retain(|name, entry| entry.image != found.image || !goes(name));
            inner.write_index(&index)?;
            if stays {
                return Ok(Collected::default());
            }
            inner.remove_record(&found.image)?;
            let mut collected = inner.sweep_layers(&trash)?;
            collected.images.push(found.image);
            Ok(collected)
        })
    }

    /// Removes images that have no name and are not in use, and layers no image needs.
    ///
    /// `in_use` is called with the store locked: it must not call the store, and must already count sandboxes being
    /// created.
    pub fn collect_garbage(&self, in_use: &dyn Fn(&ImageDigest) -> bool) -> Result<Collected, ImageError> {
        let inner = &self.inner;
        lock::remove_abandoned(&inner.tmp())?;
        let trash = Workspace::create(&inner.tmp())?;
        inner.locked(|| {
            let index: Index = inner.index()?;
            let named: HashSet<&ImageDigest> = index.references.values().map(|entry| &entry.image).collect();
            let mut images = Vec::new();
            for id in inner.record_ids()? {
                if !named.contains(&id) && !in_use(&id) {
                    inner.remove_record(&id)?;
                    images.push(id);
                }
            }
            let mut collected = inner.sweep_layers(&trash)?;
            collected.images = images;
            Ok(collected)
        })
    }
}

impl Inner {
    fn remove_record(&self, id: &ImageDigest) -> Result<(), ImageError> {
        match fs::remove_file(self.record_path(id)) {
            Err(e) if e.kind() != io::ErrorKind::NotFound => {
                Err(ImageError::io("removing an image record", e))
            }
            _ => Ok(()),
        }
    }

    fn sweep_layers(&self, trash: &Workspace) -> Result<Collected, ImageError> {
        let failed = |e: io::Error| ImageError::io("removing layers", e);
        let mut needed: HashSet<String> =
            lock::live_pins(&self.tmp())?.layers.iter().map(|id| id.hex().to_owned()).collect();
        for id in self.record_ids()? {
            // An unreadable record stops the sweep: its layers are not known.
            if let Some(record) = self.read_record(&id)? {
                needed.extend(record.parse_config()?.diff_ids.iter().map(|d| d.hex().to_owned()));
            }
        }
        let mut collected = Collected::default();
        for entry in fs::read_dir(self.dir.join("layers")).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name();
            let Some(name) = name.to_str().filter(|name| !needed.contains(*name)) else { continue };
            if let Ok(diff_id) = format!("sha256:{name}").parse::<ImageDigest>() {
                collected.bytes += self.layer_facts(&diff_id)?.unwrap_or_default().size_bytes;
            }
            fs::rename(entry.path(), trash.path().join(name)).map_err(failed)?;
            collected.layers += 1;
        }
        Ok(collected)
    }
}
