//! How much an image may cost.

/// Limits on what a layer may unpack to, so that an archive of a few kilobytes cannot fill the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnpackLimits {
    /// Bytes a layer may unpack to, headers and padding included.
    pub max_bytes: u64,
    /// Above [`Self::ratio_floor_bytes`], how many times larger than its compressed form a layer may be.
    pub max_ratio: u64,
    /// Below this many bytes the ratio does not matter.
    pub ratio_floor_bytes: u64,
    /// Entries a layer may have.
    pub max_entries: u64,
    /// Components a path may have.
    pub max_depth: usize,
}

impl Default for UnpackLimits {
    fn default() -> Self {
        Self {
            max_bytes: 20 << 30,
            max_ratio: 1000,
            ratio_floor_bytes: 1 << 30,
            max_entries: 2_000_000,
            max_depth: 256,
        }
    }
}

/// What a store allows and trusts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// Limits for every layer.
    pub limits: UnpackLimits,
    /// Registries (`host` or `host:port`) spoken to without TLS, besides the loopback ones.
    pub insecure_registries: Vec<String>,
}
