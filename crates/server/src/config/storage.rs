//! `[storage]`: what requests may mount.

use std::path::PathBuf;

use super::kinds::{FilePath, ListOf};
use super::reader::Section;
use super::rules;
use super::values::Quantity;

#[derive(Clone, Debug, PartialEq)]
pub struct StorageConfig {
    /// Empty means that no host path may be mounted.
    pub allowed_host_paths: Vec<PathBuf>,
    pub volume_default_size: Quantity,
    pub ossfs_mount_root: PathBuf,
}

impl Default for StorageConfig {
    fn default() -> Self {
        Self {
            allowed_host_paths: Vec::new(),
            volume_default_size: Quantity::parse("1Gi").expect("a literal that the tests parse"),
            ossfs_mount_root: PathBuf::from("/mnt/ossfs"),
        }
    }
}

impl StorageConfig {
    pub(super) fn keys(&mut self, section: &mut Section<'_, '_>) {
        section.key(
            "allowed_host_paths",
            ListOf(FilePath::any()),
            &mut self.allowed_host_paths,
            "Directories below which requests may mount host paths. Empty allows none.",
        );
        section.key(
            "volume_default_size",
            rules::quantity(),
            &mut self.volume_default_size,
            "Size of a Kubernetes volume when a request names none.",
        );
        section.key(
            "ossfs_mount_root",
            FilePath::absolute(),
            &mut self.ossfs_mount_root,
            "Directory under which buckets are mounted.",
        );
    }
}
