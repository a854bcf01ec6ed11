//! `[storage]`: what requests may mount.

use std::path::PathBuf;

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
