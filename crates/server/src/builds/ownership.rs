//! Whose an image is that a request names.
//!
//! Images hold the repositories that they were built from. A name that only a build makes is nobody's else than its tenant's, also when
//! somebody has come to know it.

use sandglass_builds::ports::{BuildStore, StoreError};

use super::Builds;

/// What every name begins with that a build gives: to its image, to what instructions made, to stages.
const MADE: [&str; 3] = ["osb-img-", "osb-layer-", "osb-stage-"];

/// The name without its registry, tag and digest.
fn plain(reference: &str) -> &str {
    let named = reference.split('@').next().unwrap_or_default();
    let last = named.rsplit('/').next().unwrap_or_default();
    last.split(':').next().unwrap_or_default()
}

/// Whether a text may be read as an id of an image, or the beginning of one. Names of that form are told apart by a tag.
fn may_be_id(reference: &str) -> bool {
    let digits = reference.strip_prefix("sha256:").unwrap_or(reference);
    reference.starts_with("sha256:") || (!digits.is_empty() && digits.bytes().all(|b| b.is_ascii_hexdigit()))
}

/// Whether a reference names an image that is not of this tenant: one that a build of another made, or any by its id, as which everything can be
/// tried out. Who has no namespace is the operator, to whom nothing is foreign.
pub(super) async fn is_foreign(
    rows: &dyn BuildStore,
    runtime: &str,
    reference: &str,
    namespace: Option<&str>,
) -> Result<bool, StoreError> {
    let name = plain(reference);
    if namespace.is_none() || !(may_be_id(reference) || MADE.iter().any(|made| name.starts_with(made))) {
        return Ok(false);
    }
    if may_be_id(reference) {
        return Ok(true);
    }
    let images = rows.all_images(runtime).await?;
    Ok(!images
        .iter()
        .any(|image| plain(&image.reference) == name && image.lineage.namespace.as_deref() == namespace))
}

impl Builds {
    /// Whether a reference names an image that a build of another tenant made, which does not exist for this one.
    ///
    /// # Errors
    /// When the store does not answer.
    pub async fn is_foreign(&self, reference: &str, namespace: Option<&str>) -> Result<bool, StoreError> {
        let runtime = self.inner.locator.runtime.name();
        is_foreign(self.inner.store.as_ref(), runtime, reference, namespace).await
    }
}

#[cfg(test)]
mod tests {
    use super::{may_be_id, plain};

    #[test]
    fn what_may_be_an_id_is_no_name() {
        let id = "ab12".repeat(16);
        for text in ["2e6f", "2E6F", "a", "sha256:2e", "sha256:2e6f2", &id, &format!("sha256:{id}")] {
            assert!(may_be_id(text), "{text}");
        }
        for text in
            ["", "node", "2e6f:latest", "library/2e6f", "cafe:1", "h:5000/2e6f", &format!("a@sha256:{id}")]
        {
            assert!(!may_be_id(text), "{text}");
        }
    }

    #[test]
    fn a_name_is_the_same_in_all_its_forms() {
        for text in [
            "osb-img-0-1",
            "osb-img-0-1:latest",
            "docker.io/library/osb-img-0-1:latest@sha256:00",
            "h:5000/osb-img-0-1",
        ] {
            assert_eq!(plain(text), "osb-img-0-1", "{text}");
        }
    }
}
