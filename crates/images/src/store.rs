//! The store.
use std::path::Path;

use crate::error::ImageError;
use crate::image::{Collected, Credentials, Image, ImageDigest, Platform, ProgressFn};
use crate::limits::StoreOptions;

/// A directory of unpacked layers and image records.
#[derive(Clone, Debug)]
pub struct ImageStore {}

impl ImageStore {
    /// Opens the store.
    pub fn open(dir: &Path) -> Result<Self, ImageError> {
        Self::open_with(dir, StoreOptions::default())
    }
    /// Opens the store with other limits.
    pub fn open_with(_dir: &Path, _options: StoreOptions) -> Result<Self, ImageError> {
        Ok(Self {})
    }
    /// Finds an image locally.
    pub fn resolve(&self, _reference: &str) -> Result<Option<Image>, ImageError> {
        Ok(None)
    }
    /// Pulls.
    pub async fn pull(
        &self,
        reference: &str,
        _auth: Option<Credentials>,
        _platform: Option<Platform>,
        _progress: ProgressFn<'_>,
    ) -> Result<Image, ImageError> {
        Err(ImageError::Unsupported(reference.to_owned()))
    }
    /// Imports.
    pub fn import(
        &self,
        path: &Path,
        _name: Option<&str>,
        _progress: ProgressFn<'_>,
    ) -> Result<Vec<Image>, ImageError> {
        Err(ImageError::Unsupported(path.display().to_string()))
    }
    /// Lists.
    pub fn list(&self) -> Result<Vec<Image>, ImageError> {
        Ok(Vec::new())
    }
    /// Removes a reference.
    pub fn remove(
        &self,
        _reference: &str,
        _in_use: &dyn Fn(&ImageDigest) -> bool,
    ) -> Result<Collected, ImageError> {
        Ok(Collected::default())
    }
    /// Collects garbage.
    pub fn collect_garbage(&self, _in_use: &dyn Fn(&ImageDigest) -> bool) -> Result<Collected, ImageError> {
        Ok(Collected::default())
    }
    /// The built-in image.
    pub fn ensure_host_image(&self) -> Result<Image, ImageError> {
        Err(ImageError::Unsupported("host".to_owned()))
    }
}
