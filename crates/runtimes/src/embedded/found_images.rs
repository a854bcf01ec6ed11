//! Images as they were found last: looking the `host` image up means comparing it with the host's files, and a create needs its image twice
//! within milliseconds.

use std::{
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

use sandglass_images::{Image, ImageError, ImageStore};

/// After this long the host's files are compared again, so that an upgrade of the host reaches new sandboxes.
const HOST_FRESH_FOR: Duration = Duration::from_secs(60);
/// How long after its preparation a box is started from the very image that was prepared.
const PREPARED_FRESH_FOR: Duration = Duration::from_secs(2);
/// References remembered between preparation and start.
const MOST_PREPARED: usize = 64;

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct FoundImages {
    host: Mutex<Option<(Instant, Image)>>,
    prepared: Mutex<Vec<(String, Instant, Image)>>,
}

fn present(image: &Image) -> bool {
    image.layers.iter().all(|layer| layer.is_dir())
}

impl FoundImages {
    /// The host image, if it was compared lately and still lies in the store.
    pub(super) fn host(&self) -> Option<Image> {
        let (at, image) = self.host.lock().unwrap_or_else(PoisonError::into_inner).clone()?;
        (at.elapsed() < HOST_FRESH_FOR && present(&image)).then_some(image)
    }

    /// Compares, makes the host image if need be, and remembers it. Blocking.
    pub(super) fn make_host(&self, images: &ImageStore) -> Result<Image, ImageError> {
        let image = images.ensure_host_image()?;
        *self.host.lock().unwrap_or_else(PoisonError::into_inner) = Some((Instant::now(), image.clone()));
        Ok(image)
    }

    /// Remembers what a reference led to when it was prepared.
    pub(super) fn prepared(&self, reference: &str, image: &Image) {
        let mut prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        prepared.retain(|(known, at, _)| known != reference && at.elapsed() < PREPARED_FRESH_FOR);
        if prepared.len() < MOST_PREPARED {
            prepared.push((reference.to_owned(), Instant::now(), image.clone()));
        }
    }

    /// What a reference led to a moment ago.
    pub(super) fn just_prepared(&self, reference: &str) -> Option<Image> {
        let prepared = self.prepared.lock().unwrap_or_else(PoisonError::into_inner);
        let (_, at, image) = prepared.iter().find(|(known, ..)| known == reference)?;
        (at.elapsed() < PREPARED_FRESH_FOR && present(image)).then(|| image.clone())
    }
}
