//! Refused images, and removing images that somebody may use.

use std::time::Duration;

use sandglass_sandbox::Timestamp;

use super::{Rules, rules::doubled};
use crate::{
    build::IllegalTransition,
    image::{Image, ImageState, Removal},
    time::after,
};

/// How a removal is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Insistence {
    /// Only if nobody uses it.
    IfUnused,
    /// Nobody may begin to use it; removed when the last one is done.
    Force,
}

/// Why an image is not removed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Kept {
    #[error("the image is used by {0} sandboxes or builds; `force` removes it when they are done")]
    InUse(u64),
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
}

/// The row with the removal begun, or blocked until nobody uses it; `None` when that was done before.
///
/// # Errors
/// When it is in use and the removal is not forced.
pub fn remove(image: &Image, insistence: Insistence) -> Result<Option<Image>, Kept> {
    if matches!(image.state, ImageState::Deleting | ImageState::Deleted) {
        return Ok(None);
    }
    if image.holders == 0 {
        return Ok(Some(image.becoming(ImageState::Deleting)?));
    }
    match insistence {
        Insistence::IfUnused => Err(Kept::InUse(image.holders)),
        Insistence::Force if image.blocked => Ok(None),
        Insistence::Force => Ok(Some(Image { blocked: true, ..image.clone() })),
    }
}

/// The row after a creation from it was refused.
///
/// # Errors
/// Never by the table as it is.
pub fn refused(image: &Image, rules: &Rules) -> Result<Image, IllegalTransition> {
    let failures = image.restore_failures.saturating_add(1);
    let counted = Image { restore_failures: failures, ..image.clone() };
    let usable = matches!(image.state, ImageState::Ready | ImageState::Superseded);
    if usable && failures >= rules.quarantine_at {
        counted.becoming(ImageState::Quarantined)
    } else {
        Ok(counted)
    }
}

/// The row after a try to remove the artifact that did not remove it for certain.
pub fn not_removed(image: &Image, error: String, rules: &Rules, now: Timestamp) -> Image {
    let tries = image.removal.tries.saturating_add(1);
    let most = rules.removal_back_off.saturating_mul(64).max(Duration::from_secs(1));
    let wait = doubled(rules.removal_back_off, tries - 1, most);
    let removal = Removal { tries, not_before: Some(after(now, wait)), last_error: Some(error) };
    Image { removal, ..image.clone() }
}
