//! A store in memory.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use async_trait::async_trait;
use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId, Timestamp};

use super::{Faults, Tables, faults::Injected};
use crate::{
    build::{ImageBuild, Slot},
    image::{Image, ImageState, Lineage, Tag},
    key::{BuildKey, TagName},
    ports::{Advance, BuildFilter, BuildStore, Commit, ImageFilter, Inserted, Negative, StoreError},
    prebuild::Prebuild,
};

/// One server's connection to the tables.
#[derive(Debug)]
pub struct MemoryStore {
    tables: Arc<Mutex<Tables>>,
    faults: Arc<Faults>,
}

impl MemoryStore {
    pub fn new(tables: Arc<Mutex<Tables>>, faults: Arc<Faults>) -> Self {
        Self { tables, faults }
    }

    /// One call: a point, the effect, another point.
    async fn call<T>(&self, name: &str, effect: impl FnOnce(&mut Tables) -> T) -> Result<T, StoreError> {
        let lost = |Injected| StoreError::Unavailable("told to fail".to_owned());
        self.faults.before(name).await.map_err(lost)?;
        let done = effect(&mut self.tables());
        self.faults.after(name).await.map_err(lost)?;
        Ok(done)
    }

    fn tables(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn page<T>(rows: Vec<T>, offset: u64, limit: u64) -> (Vec<T>, u64) {
    let all = rows.len() as u64;
    let (offset, limit) =
        (usize::try_from(offset).unwrap_or(usize::MAX), usize::try_from(limit).unwrap_or(usize::MAX));
    (rows.into_iter().skip(offset).take(limit).collect(), all)
}

#[async_trait]
impl BuildStore for MemoryStore {
    async fn insert_build(&self, build: &ImageBuild) -> Result<Inserted, StoreError> {
        self.call("insert_build", |t| t.insert_build(build)).await
    }

    async fn commit(&self, commit: Commit<'_>) -> Result<Advance, StoreError> {
        self.call("commit", |t| t.commit(&commit)).await
    }

    async fn build(&self, id: ImageBuildId) -> Result<Option<ImageBuild>, StoreError> {
        self.call("build", |t| t.builds.get(&id).cloned()).await
    }

    async fn in_flight(&self, slot: &Slot) -> Result<Option<ImageBuild>, StoreError> {
        let under_way = |row: &&ImageBuild| row.slot == *slot && !row.state.terminal();
        self.call("in_flight", |t| t.builds.values().find(under_way).cloned()).await
    }

    async fn open_builds(&self, runtime: &str) -> Result<Vec<ImageBuild>, StoreError> {
        let open = |row: &&ImageBuild| {
            row.slot.runtime == runtime && (!row.state.terminal() || !row.obligations.is_empty())
        };
        self.call("open_builds", |t| t.builds.values().filter(open).cloned().collect()).await
    }

    async fn ended_builds(&self, runtime: &str, before: Timestamp) -> Result<Vec<ImageBuild>, StoreError> {
        let ended = |row: &&ImageBuild| {
            row.slot.runtime == runtime
                && row.obligations.is_empty()
                && row.finished_at.is_some_and(|at| at < before)
        };
        self.call("ended_builds", |t| t.builds.values().filter(ended).cloned().collect()).await
    }

    async fn builds(
        &self,
        filter: &BuildFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<ImageBuild>, u64), StoreError> {
        let matches = |row: &&ImageBuild| {
            row.slot.namespace == filter.namespace
                && (filter.states.is_empty() || filter.states.contains(&row.state))
                && filter.repository_key.as_ref().is_none_or(|key| *key == row.plan.repository_key)
        };
        self.call("builds", |t| {
            let mut rows: Vec<_> = t.builds.values().filter(matches).cloned().collect();
            rows.sort_by_key(|row| std::cmp::Reverse((row.created_at, row.id)));
            page(rows, offset, limit)
        })
        .await
    }

    async fn delete_build(&self, id: ImageBuildId, expected: u64) -> Result<Advance, StoreError> {
        self.call("delete_build", |t| match t.builds.get(&id) {
            Some(row) if row.version == expected => {
                t.builds.remove(&id);
                Advance::Written
            }
            _ => Advance::Lost,
        })
        .await
    }

    async fn reserve_ordinal(&self, runtime: &str, key: &BuildKey) -> Result<u64, StoreError> {
        self.call("reserve_ordinal", |t| {
            let last = t.ordinals.entry((runtime.to_owned(), key.as_str()[..12].to_owned())).or_default();
            *last += 1;
            *last
        })
        .await
    }

    async fn negative(&self, slot: &Slot) -> Result<Option<Negative>, StoreError> {
        self.call("negative", |t| t.negatives.get(slot).cloned()).await
    }

    async fn forget_negative(&self, slot: &Slot) -> Result<(), StoreError> {
        self.call("forget_negative", |t| drop(t.negatives.remove(slot))).await
    }

    async fn prune_negatives(&self, before: Timestamp) -> Result<u64, StoreError> {
        self.call("prune_negatives", |t| {
            let all = t.negatives.len();
            t.negatives.retain(|_, negative| negative.until >= before);
            (all - t.negatives.len()) as u64
        })
        .await
    }

    async fn image(&self, id: ImageId) -> Result<Option<Image>, StoreError> {
        self.call("image", |t| t.images.get(&id).cloned()).await
    }

    async fn images_of(&self, lineage: &Lineage) -> Result<Vec<Image>, StoreError> {
        let of = |image: &&Image| image.lineage == *lineage && image.state != ImageState::Deleted;
        self.call("images_of", |t| t.images.values().filter(of).cloned().collect()).await
    }

    async fn all_images(&self, runtime: &str) -> Result<Vec<Image>, StoreError> {
        let of = |image: &&Image| image.lineage.runtime == runtime;
        self.call("all_images", |t| t.images.values().filter(of).cloned().collect()).await
    }

    async fn images(
        &self,
        filter: &ImageFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<Image>, u64), StoreError> {
        let matches = |image: &&Image| {
            image.lineage.namespace == filter.namespace
                && filter.repository_key.as_ref().is_none_or(|key| *key == image.repository_key)
                && if filter.states.is_empty() {
                    image.state != ImageState::Deleted
                } else {
                    filter.states.contains(&image.state)
                }
        };
        self.call("images", |t| {
            let mut rows: Vec<_> = t.images.values().filter(matches).cloned().collect();
            rows.sort_by_key(|image| std::cmp::Reverse((image.created_at, image.id)));
            page(rows, offset, limit)
        })
        .await
    }

    async fn advance_image(&self, expected: u64, image: &Image) -> Result<Advance, StoreError> {
        self.call("advance_image", |t| t.advance_image(expected, image)).await
    }

    async fn delete_image(&self, id: ImageId, expected: u64) -> Result<Advance, StoreError> {
        self.call("delete_image", |t| match t.images.get(&id) {
            Some(row) if row.version == expected => {
                t.images.remove(&id);
                Advance::Written
            }
            _ => Advance::Lost,
        })
        .await
    }

    async fn acquire(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<Advance, StoreError> {
        self.call("acquire", |t| t.acquire(id, holder, at)).await
    }

    async fn release(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<(), StoreError> {
        self.call("release", |t| t.release(id, holder, at)).await
    }

    async fn holders(&self, _: &str) -> Result<Vec<(ImageId, String)>, StoreError> {
        self.call("holders", |t| t.holders.iter().cloned().collect()).await
    }

    async fn tag(
        &self,
        namespace: Option<&str>,
        repository_key: &str,
        name: &TagName,
    ) -> Result<Option<Tag>, StoreError> {
        let key = (namespace.map(str::to_owned), repository_key.to_owned(), name.clone());
        self.call("tag", |t| t.tags.get(&key).cloned()).await
    }

    async fn move_tag(&self, tag: &Tag) -> Result<Advance, StoreError> {
        self.call("move_tag", |t| t.move_tag(tag)).await
    }

    async fn insert_prebuild(&self, prebuild: &Prebuild) -> Result<(), StoreError> {
        self.call("insert_prebuild", |t| drop(t.prebuilds.insert(prebuild.id, prebuild.clone()))).await
    }

    async fn advance_prebuild(&self, expected: u64, prebuild: &Prebuild) -> Result<Advance, StoreError> {
        self.call("advance_prebuild", |t| match t.prebuilds.get(&prebuild.id) {
            Some(row) if row.version == expected => {
                t.prebuilds.insert(prebuild.id, prebuild.clone());
                Advance::Written
            }
            _ => Advance::Lost,
        })
        .await
    }

    async fn delete_prebuild(&self, id: PrebuildId, expected: u64) -> Result<Advance, StoreError> {
        self.call("delete_prebuild", |t| match t.prebuilds.get(&id) {
            Some(row) if row.version == expected => {
                t.prebuilds.remove(&id);
                Advance::Written
            }
            _ => Advance::Lost,
        })
        .await
    }

    async fn prebuild(&self, id: PrebuildId) -> Result<Option<Prebuild>, StoreError> {
        self.call("prebuild", |t| t.prebuilds.get(&id).cloned()).await
    }

    async fn prebuilds(&self) -> Result<Vec<Prebuild>, StoreError> {
        self.call("prebuilds", |t| t.prebuilds.values().cloned().collect()).await
    }
}
