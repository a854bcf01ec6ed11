//! The implementation of the [`BuildStore`] port, over either engine.

use async_trait::async_trait;
use sandglass_builds::{
    build::{ImageBuild, Slot},
    image::{Image, Lineage, Tag},
    key::{BuildKey, TagName},
    ports::{
        Advance, BuildFilter, BuildStore, Commit, ImageFilter, Inserted, Negative, NegativeChange, StoreError,
    },
    prebuild::Prebuild,
};
use sandglass_sandbox::{ImageBuildId, ImageId, PrebuildId, Timestamp};

use super::{
    build_events, built_images, database::within, event_log::OF_BUILD, events, image_builds, prebuilds,
    sql_store::SqlStore, sql_store::outcome,
};

/// A build can end between its refusal and the look at it, but hardly so often.
const INSERT_ATTEMPTS: u32 = 5;

/// What lines about a build are written under.
fn subject(id: ImageBuildId) -> String {
    format!("{OF_BUILD}{id}")
}

/// A statement that changes nothing.
macro_rules! reading {
    ($self:ident, |$on:ident| $work:expr) => {
        within($self.limit, async {
            let mut session = $self.database.reader().await?;
            let $on = &mut session;
            $work.await
        })
        .await
    };
}

/// Statements that are done all or not.
macro_rules! writing {
    ($self:ident, |$on:ident| $work:expr) => {
        within($self.limit, async {
            let mut session = $self.database.begin().await?;
            let $on = &mut session;
            let done = $work.await?;
            session.commit().await?;
            Ok(done)
        })
        .await
    };
}

#[async_trait]
impl BuildStore for SqlStore {
    async fn insert_build(&self, build: &ImageBuild) -> Result<Inserted, StoreError> {
        for _ in 0..INSERT_ATTEMPTS {
            let inserted = writing!(self, |on| async {
                let inserted = image_builds::insert(on, build).await?;
                if inserted == Some(Inserted::Written) {
                    events::append_about(on, &subject(build.id), &[build_events::queued(build)]).await?;
                }
                Ok::<_, StoreError>(inserted)
            })?;
            if let Some(inserted) = inserted {
                return Ok(inserted);
            }
        }
        Err(StoreError::Unavailable("builds of one image begin and end too fast".into()))
    }

    async fn commit(&self, commit: Commit<'_>) -> Result<Advance, StoreError> {
        within(self.limit, async {
            let mut tx = self.database.begin().await?;
            let before = image_builds::find(&mut tx, commit.build.id).await?;
            if !image_builds::replace(&mut tx, &commit).await? {
                return Ok(Advance::Lost);
            }
            match commit.negative {
                Some(NegativeChange::Remember(negative)) => {
                    image_builds::remember(&mut tx, negative).await?;
                }
                Some(NegativeChange::Forget) => {
                    image_builds::forget_negative(&mut tx, &commit.build.slot).await?;
                }
                None => {}
            }
            if let Some(new) = commit.image {
                built_images::insert(&mut tx, new).await?;
            }
            if let Some(before) = before {
                // Last: lines hold a lock that is shared with all who write any.
                let lines = build_events::between(&before, commit.build);
                events::append_about(&mut tx, &subject(commit.build.id), &lines).await?;
            }
            tx.commit().await?;
            Ok(Advance::Written)
        })
        .await
    }

    async fn build(&self, id: ImageBuildId) -> Result<Option<ImageBuild>, StoreError> {
        reading!(self, |on| image_builds::find(on, id))
    }

    async fn in_flight(&self, slot: &Slot) -> Result<Option<ImageBuild>, StoreError> {
        reading!(self, |on| image_builds::in_flight(on, slot))
    }

    async fn open_builds(&self, runtime: &str) -> Result<Vec<ImageBuild>, StoreError> {
        reading!(self, |on| image_builds::open(on, runtime))
    }

    async fn ended_builds(&self, runtime: &str, before: Timestamp) -> Result<Vec<ImageBuild>, StoreError> {
        reading!(self, |on| image_builds::ended(on, runtime, before))
    }

    async fn builds(
        &self,
        filter: &BuildFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<ImageBuild>, u64), StoreError> {
        reading!(self, |on| image_builds::page(on, filter, offset, limit))
    }

    async fn delete_build(&self, id: ImageBuildId, expected: u64) -> Result<Advance, StoreError> {
        writing!(self, |on| image_builds::delete(on, id, expected)).map(outcome)
    }

    async fn reserve_ordinal(&self, runtime: &str, key: &BuildKey) -> Result<u64, StoreError> {
        writing!(self, |on| image_builds::reserve_ordinal(on, runtime, key))
    }

    async fn negative(&self, slot: &Slot) -> Result<Option<Negative>, StoreError> {
        reading!(self, |on| image_builds::negative(on, slot))
    }

    async fn forget_negative(&self, slot: &Slot) -> Result<(), StoreError> {
        writing!(self, |on| image_builds::forget_negative(on, slot))
    }

    async fn prune_negatives(&self, before: Timestamp) -> Result<u64, StoreError> {
        writing!(self, |on| image_builds::prune_negatives(on, before))
    }

    async fn image(&self, id: ImageId) -> Result<Option<Image>, StoreError> {
        reading!(self, |on| built_images::find(on, id))
    }

    async fn images_of(&self, lineage: &Lineage) -> Result<Vec<Image>, StoreError> {
        reading!(self, |on| built_images::of_lineage(on, lineage))
    }

    async fn all_images(&self, runtime: &str) -> Result<Vec<Image>, StoreError> {
        reading!(self, |on| built_images::of_runtime(on, runtime))
    }

    async fn images(
        &self,
        filter: &ImageFilter,
        offset: u64,
        limit: u64,
    ) -> Result<(Vec<Image>, u64), StoreError> {
        reading!(self, |on| built_images::page(on, filter, offset, limit))
    }

    async fn advance_image(&self, expected: u64, image: &Image) -> Result<Advance, StoreError> {
        writing!(self, |on| built_images::replace(on, expected, image)).map(outcome)
    }

    async fn delete_image(&self, id: ImageId, expected: u64) -> Result<Advance, StoreError> {
        writing!(self, |on| built_images::delete(on, id, expected)).map(outcome)
    }

    async fn acquire(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<Advance, StoreError> {
        writing!(self, |on| built_images::acquire(on, id, holder, at)).map(outcome)
    }

    async fn release(&self, id: ImageId, holder: &str, at: Timestamp) -> Result<(), StoreError> {
        writing!(self, |on| built_images::release(on, id, holder, at))
    }

    async fn holders(&self, runtime: &str) -> Result<Vec<(ImageId, String)>, StoreError> {
        reading!(self, |on| built_images::holders(on, runtime))
    }

    async fn tag(
        &self,
        namespace: Option<&str>,
        repository_key: &str,
        name: &TagName,
    ) -> Result<Option<Tag>, StoreError> {
        reading!(self, |on| built_images::tag(on, namespace, repository_key, name))
    }

    async fn move_tag(&self, tag: &Tag) -> Result<Advance, StoreError> {
        writing!(self, |on| built_images::move_tag(on, tag)).map(outcome)
    }

    async fn insert_prebuild(&self, prebuild: &Prebuild) -> Result<(), StoreError> {
        writing!(self, |on| prebuilds::insert(on, prebuild))
    }

    async fn advance_prebuild(&self, expected: u64, prebuild: &Prebuild) -> Result<Advance, StoreError> {
        writing!(self, |on| prebuilds::replace(on, expected, prebuild)).map(outcome)
    }

    async fn delete_prebuild(&self, id: PrebuildId, expected: u64) -> Result<Advance, StoreError> {
        writing!(self, |on| prebuilds::delete(on, id, expected)).map(outcome)
    }

    async fn prebuild(&self, id: PrebuildId) -> Result<Option<Prebuild>, StoreError> {
        reading!(self, |on| prebuilds::find(on, id))
    }

    async fn prebuilds(&self) -> Result<Vec<Prebuild>, StoreError> {
        reading!(self, |on| prebuilds::all(on))
    }
}
