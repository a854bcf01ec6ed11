//! The `host` image, looked up once a minute: comparing it with the host's files costs milliseconds that a create need not pay.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandglass_images::{Image, ImageError, ImageStore};

/// After this long the host's files are compared again, so that an upgrade of the host reaches new sandboxes.
const FRESH_FOR: Duration = Duration::from_secs(60);

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct HostImage(Mutex<Option<(Instant, Image)>>);

impl HostImage {
    /// The image, if it was compared lately and still lies in the store.
    pub(super) fn remembered(&self) -> Option<Image> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let (at, image) = known?;
        (at.elapsed() < FRESH_FOR && image.layers.iter().all(|layer| layer.is_dir())).then_some(image)
    }

    /// Compares, makes it if need be, and remembers it. Blocking.
    pub(super) fn make(&self, images: &ImageStore) -> Result<Image, ImageError> {
        let image = images.ensure_host_image()?;
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), image.clone()));
        Ok(image)
    }
}
