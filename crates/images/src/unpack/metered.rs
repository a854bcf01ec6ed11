//! Counts, digests and limits what comes out of a decompressor.

use std::io::{self, Read};
use std::sync::atomic::{AtomicBool, Ordering};

use sha2::{Digest as _, Sha256};

use crate::compression::LimitPassed;
use crate::image::ImageDigest;
use crate::limits::UnpackLimits;

/// The decompressed stream of a layer.
pub(crate) struct Metered<'a, R> {
    inner: R,
    hasher: Sha256,
    count: u64,
    limit: u64,
    cancelled: &'a AtomicBool,
}

impl<'a, R: Read> Metered<'a, R> {
    pub(crate) fn new(inner: R, compressed: u64, limits: &UnpackLimits, cancelled: &'a AtomicBool) -> Self {
        let by_ratio = compressed.saturating_mul(limits.max_ratio).max(limits.ratio_floor_bytes);
        Self { inner, hasher: Sha256::new(), count: 0, limit: limits.max_bytes.min(by_ratio), cancelled }
    }

    pub(crate) fn digest(self) -> ImageDigest {
        ImageDigest::from_hash(&self.hasher.finalize().into())
    }
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.cancelled.load(Ordering::Relaxed) {
            // Not `Interrupted`: the standard library would retry that for ever.
            return Err(io::Error::from_raw_os_error(rustix::io::Errno::CANCELED.raw_os_error()));
        }
        let n = self.inner.read(buf)?;
        self.count += n as u64;
        if self.count > self.limit {
            let limit = self.limit;
            return Err(io::Error::other(LimitPassed(format!("a layer unpacks to more than {limit} bytes"))));
        }
        self.hasher.update(&buf[..n]);
        Ok(n)
    }
}
