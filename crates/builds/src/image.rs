//! Images: the record of what a build made, its states and the one table of their transitions; and tags.
//!
//! The artifact belongs to the engine; the record says how to find it again and who uses it.

use serde::{Deserialize, Serialize};

use sandglass_sandbox::{ImageBuildId, ImageId, Timestamp};

use crate::{
    build::{Checkout, IllegalTransition},
    key::{ArtifactName, BuildKey, RecipeKey, TagName},
};

/// Where an image stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum ImageState {
    /// The newest of its lineage when it was made.
    Ready,
    /// A newer one of its lineage exists. Still good for the commits it was made of.
    Superseded,
    /// Refused too often when a sandbox was to be made of it; never used again.
    Quarantined,
    /// The artifact is being removed.
    Deleting,
    /// The artifact is gone for certain.
    Deleted,
}

impl ImageState {
    /// Every state, in the order of an image's life.
    pub const ALL: [Self; 5] =
        [Self::Ready, Self::Superseded, Self::Quarantined, Self::Deleting, Self::Deleted];

    /// The word on the wire and in the store.
    pub fn word(self) -> &'static str {
        match self {
            Self::Ready => "Ready",
            Self::Superseded => "Superseded",
            Self::Quarantined => "Quarantined",
            Self::Deleting => "Deleting",
            Self::Deleted => "Deleted",
        }
    }

    /// The state of a word.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.word() == word)
    }

    /// The table of legal transitions. Nothing leads out of a removal: the artifact may be gone already.
    pub fn may_become(self, next: Self) -> bool {
        matches!(
            (self, next),
            (Self::Ready, Self::Superseded | Self::Quarantined | Self::Deleting)
                | (Self::Superseded, Self::Quarantined | Self::Deleting)
                | (Self::Quarantined, Self::Deleting)
                | (Self::Deleting, Self::Deleted)
        )
    }
}

/// Images that may stand in for each other, because only their commits differ.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lineage {
    /// The tenant's namespace: images are never shared between tenants, as they hold their repositories.
    pub namespace: Option<String>,
    /// The engine that made it.
    pub runtime: String,
    pub recipe_key: RecipeKey,
}

/// One image as the store keeps it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Image {
    pub id: ImageId,
    /// Grows with every write, also when somebody begins or ends to use it.
    pub version: u64,
    pub lineage: Lineage,
    pub key: BuildKey,
    /// Which repository it is of, as tags and lists name it.
    pub repository_key: String,
    pub artifact: ArtifactName,
    /// What the runtime takes as the image of a new sandbox.
    pub reference: String,
    pub digest: Option<String>,
    pub size_bytes: u64,
    /// What is checked out in it.
    pub checkouts: Vec<Checkout>,
    pub agent_generation: u32,
    pub platform: String,
    pub state: ImageState,
    /// Not to be used any more; removed as soon as nobody uses it.
    pub blocked: bool,
    pub image_build_id: ImageBuildId,
    /// How many use it: sandboxes, and builds that start from it. Kept by the store from its holders.
    pub holders: u64,
    /// Names that point at it. Kept by the store from its tags.
    pub tags: Vec<TagName>,
    /// Creations that it was refused for since it last served.
    pub restore_failures: u32,
    /// Builds in a row that each started from the one before; 0 when it was made from its base.
    #[serde(default)]
    pub increments: u32,
    /// Tries to remove the artifact, and when the next one is due.
    pub removal: Removal,
    pub created_at: Timestamp,
    pub last_used_at: Timestamp,
}

/// How far the removal of an artifact is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Removal {
    pub tries: u32,
    pub not_before: Option<Timestamp>,
    pub last_error: Option<String>,
}

impl Image {
    /// Whether a sandbox may be made from it.
    pub fn usable(&self) -> bool {
        !self.blocked && matches!(self.state, ImageState::Ready | ImageState::Superseded)
    }

    /// The record in its next state.
    ///
    /// # Errors
    /// When the table does not allow it.
    pub fn becoming(&self, next: ImageState) -> Result<Self, IllegalTransition> {
        if self.state.may_become(next) {
            Ok(Self { state: next, ..self.clone() })
        } else {
            Err(IllegalTransition { what: "image", from: self.state.word(), to: next.word() })
        }
    }
}

/// A name that somebody moved to an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Tag {
    pub namespace: Option<String>,
    pub repository_key: String,
    pub name: TagName,
    pub image: ImageId,
    pub moved_at: Timestamp,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_of_transitions() {
        let table: Vec<String> = ImageState::ALL
            .into_iter()
            .map(|from| {
                let to: Vec<_> = ImageState::ALL
                    .into_iter()
                    .filter(|to| from.may_become(*to))
                    .map(ImageState::word)
                    .collect();
                format!("{} -> {}", from.word(), to.join(" ")).trim_end().to_owned()
            })
            .collect();
        assert_eq!(
            table,
            [
                "Ready -> Superseded Quarantined Deleting",
                "Superseded -> Quarantined Deleting",
                "Quarantined -> Deleting",
                "Deleting -> Deleted",
                "Deleted ->",
            ]
        );
        assert!(ImageState::ALL.into_iter().all(|s| ImageState::of_word(s.word()) == Some(s)));
    }
}
