//! The store port: rows of builds, images, tags, prebuilds and recent failures.

use async_trait::async_trait;
pub use sandglass_sandbox::ports::store::{Advance, StoreError};
use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId, Timestamp};
use serde::{Deserialize, Serialize};

use crate::{
    build::{BuildState, Cause, ImageBuild, Slot},
    image::{Image, ImageState, Lineage, Tag},
    key::{BuildKey, TagName},
    prebuild::Prebuild,
};

/// Outcome of inserting a build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Inserted {
    Written,
    /// Another build of the slot is under way, or this one is there already.
    InFlight(ImageBuildId),
}

/// A failure that is remembered, so that the same build is not begun again at once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Negative {
    pub slot: Slot,
    pub build: ImageBuildId,
    pub cause: Cause,
    /// Failures in a row.
    pub failures: u32,
    pub until: Timestamp,
}

/// What a commit does to the remembered failure of the build's slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NegativeChange {
    Remember(Negative),
    Forget,
}

/// An image that a commit accepts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NewImage {
    pub image: Image,
    /// Who uses it from the beginning: those who waited.
    pub holders: Vec<String>,
    /// Moved to it, wherever they were.
    pub tags: Vec<Tag>,
    /// Ready images that it supersedes; those that are not Ready any more are left alone.
    pub supersedes: Vec<ImageId>,
}

/// One write of a build's row and what belongs to it, all or nothing.
#[derive(Debug, Clone)]
pub struct Commit<'a> {
    /// The version that is replaced; the new row's is one higher.
    pub expected: u64,
    pub build: &'a ImageBuild,
    pub image: Option<&'a NewImage>,
    pub negative: Option<&'a NegativeChange>,
}

/// Which builds to list; filters are joined by AND.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BuildFilter {
    /// Only of this tenant's namespace; `None`: only those without one.
    pub namespace: Option<String>,
    /// One of these; empty: all.
    pub states: Vec<BuildState>,
    pub repository_key: Option<String>,
}

/// Which images to list; filters are joined by AND.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageFilter {
    /// Only of this tenant's namespace; `None`: only those without one.
    pub namespace: Option<String>,
    /// One of these; empty: all but Deleted.
    pub states: Vec<ImageState>,
    pub repository_key: Option<String>,
}

/// Rows. Every conditional write is conditional on the version; a lost race is a value. An error leaves open whether it was written.
#[async_trait]
pub trait BuildStore: Send + Sync + 'static {
    /// Inserts a build that is Queued, unless another of its slot is under way.
    async fn insert_build(&self, build: &ImageBuild) -> Result<Inserted, StoreError>;

    /// Writes the commit if the row's version is still the expected one.
    async fn commit(&self, commit: Commit<'_>) -> Result<Advance, StoreError>;

    async fn build(&self, id: ImageBuildId) -> Result<Option<ImageBuild>, StoreError>;

    /// The build of the slot that is under way.
    async fn in_flight(&self, slot: &Slot) -> Result<Option<ImageBuild>, StoreError>;

    /// Every build of the engine that is under way, or ended and has obligations left.
    async fn open_builds(&self, runtime: &str) -> Result<Vec<ImageBuild>, StoreError>;

    /// Ended builds of the engine without obligations that finished before.
    async fn ended_builds(&self, runtime: &str, before: Timestamp) -> Result<Vec<ImageBuild>, StoreError>;

    /// A page of the matching builds, newest first, ties by descending id; and how many match in all.
    async fn builds(
        &self,
        filter: &BuildFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<ImageBuild>, u64), StoreError>;

    /// Removes the row if its version is still the expected one.
    async fn delete_build(&self, id: ImageBuildId, expected: u64) -> Result<Advance, StoreError>;

    /// The next number for the engine and the first twelve digits of the key, starting with 1. Never given twice, also after all rows are gone.
    async fn reserve_ordinal(&self, runtime: &str, key: &BuildKey) -> Result<u64, StoreError>;

    /// The remembered failure of the slot.
    async fn negative(&self, slot: &Slot) -> Result<Option<Negative>, StoreError>;

    async fn forget_negative(&self, slot: &Slot) -> Result<(), StoreError>;

    /// Forgets failures that were over before.
    async fn prune_negatives(&self, before: Timestamp) -> Result<u64, StoreError>;

    async fn image(&self, id: ImageId) -> Result<Option<Image>, StoreError>;

    /// Every image of the lineage that is not Deleted.
    async fn images_of(&self, lineage: &Lineage) -> Result<Vec<Image>, StoreError>;

    /// Every image of the engine, also Deleted ones.
    async fn all_images(&self, runtime: &str) -> Result<Vec<Image>, StoreError>;

    /// A page of the matching images, newest first, ties by descending id; and how many match in all.
    async fn images(
        &self,
        filter: &ImageFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<Image>, u64), StoreError>;

    /// Replaces the row if its version is still the expected one. `holders` and `tags` of the new row are not written; becoming `Deleting` drops
    /// the image's tags.
    async fn advance_image(&self, expected: u64, image: &Image) -> Result<Advance, StoreError>;

    /// Removes the row if its version is still the expected one.
    async fn delete_image(&self, id: ImageId, expected: u64) -> Result<Advance, StoreError>;

    /// Adds a holder and stamps the use, if the image is usable; lost otherwise. Adding one twice is adding it once.
    async fn acquire(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<Advance, StoreError>;

    /// Takes a holder away and stamps the use. Nothing there is success.
    async fn release(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<(), StoreError>;

    /// Every holder of every image of the engine.
    async fn holders(&self, runtime: &str) -> Result<Vec<(ImageId, String)>, StoreError>;

    /// The tag of the repository, if there is one.
    async fn tag(
        &self,
        namespace: Option<&str>,
        repository_key: &str,
        name: &TagName,
    ) -> Result<Option<Tag>, StoreError>;

    /// Moves the tag, if the image is usable; lost otherwise.
    async fn move_tag(&self, tag: &Tag) -> Result<Advance, StoreError>;

    async fn insert_prebuild(&self, prebuild: &Prebuild) -> Result<(), StoreError>;

    /// Replaces the row if its version is still the expected one.
    async fn advance_prebuild(&self, expected: u64, prebuild: &Prebuild) -> Result<Advance, StoreError>;

    async fn delete_prebuild(&self, id: PrebuildId, expected: u64) -> Result<Advance, StoreError>;

    async fn prebuild(&self, id: PrebuildId) -> Result<Option<Prebuild>, StoreError>;

    /// Every prebuild, whatever its namespace.
    async fn prebuilds(&self) -> Result<Vec<Prebuild>, StoreError>;
}
