//! The sweep: builds whose owner is gone, what ended builds left, images to be removed, rows to be forgotten.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    sync::Arc,
};

use sandglass_sandbox::{ImageBuildId, ImageId, Timestamp};
use tracing::{info, warn};

use super::{Driver, Takeover, change::Draft};
use crate::{
    build::{BuildState, ImageBuild},
    decide::{
        ending::{self, Outcome},
        recover::{self, Recovery},
        removal::{self, Insistence},
        retention::{self, Wish},
    },
    image::{Image, ImageState, Lineage},
    ports::{Advance, StoreError},
    prebuild::Prebuild,
    time::since,
};

impl Driver {
    pub(super) async fn sweep_on(self: Arc<Self>) {
        loop {
            if let Err(error) = self.sweep().await {
                warn!(%error, "the sweep is tried again");
            }
            tokio::select! {
                () = tokio::time::sleep(self.settings.sweep_every) => {}
                () = self.dirt.notified() => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    async fn sweep(self: &Arc<Self>) -> Result<(), StoreError> {
        // Each part on its own: what cannot be done of one does not keep the others waiting.
        let recovered = self.recover(Takeover::WhenExpired).await;
        let removed = self.remove_images().await;
        let forgotten = self.forget_ended().await;
        recovered.and(removed).and(forgotten)
    }

    /// Finds everybody an owner who has none, and clears what is left.
    pub(super) async fn recover(self: &Arc<Self>, takeover: Takeover) -> Result<(), StoreError> {
        for row in self.ports.store.open_builds(self.ports.engine.name()).await? {
            let id = row.id;
            let mine = self.mine().contains(&id);
            if takeover == Takeover::AtOnce && !row.state.terminal() {
                self.open_log(id).await;
            }
            match recover::recovery(&row, mine, takeover, self.now()) {
                Recovery::Interrupted => {
                    self.spawn_for(id, |driver| driver.interrupted(row));
                }
                Recovery::FindArtifact(name) => self.spawn_for(id, |driver| driver.find_artifact(id, name)),
                Recovery::Nothing if !mine && !recover::due(&row, self.now()).is_empty() => {
                    self.spawn_for(id, |driver| async move { driver.clear(id).await });
                }
                Recovery::Nothing => {}
            }
        }
        Ok(())
    }

    /// Whoever follows the log of a build that has not ended waits for its end, also before its turn.
    pub(super) async fn open_log(&self, id: ImageBuildId) {
        if let Err(error) = self.ports.logs.open(id).await {
            warn!(build = %id, %error, "the build has no log yet");
        }
    }

    /// Whoever follows the log of a build that ended comes to its end.
    pub(super) async fn close_log(&self, id: ImageBuildId) {
        if let Err(error) = self.ports.logs.seal(id).await {
            warn!(build = %id, %error, "the log of the build was not closed");
        }
    }

    /// The attempt is over with its owner: the build waits for another turn, or ends.
    async fn interrupted(self: Arc<Self>, row: ImageBuild) {
        let (id, fence) = (row.id, row.last_fence);
        // Before anything is written: it may be what fills the disk of the store.
        self.let_go(id, row.attempt).await;
        self.note(&row, "its server ended meanwhile, or was cut off from its records").await;
        let (now, tail) = (self.now(), self.ports.logs.tail(id).await.unwrap_or_default());
        let ended = self
            .end_row(id, |row| {
                if !matches!(row.state, BuildState::Running | BuildState::Finalizing)
                    || row.last_fence != fence
                {
                    return Ok(None);
                }
                let mut ending = ending::after_attempt(row, &Outcome::Interrupted, None, self.rules(), now)?;
                super::finish::with_tail(&mut ending, &tail);
                Ok(Some(Draft { row: ending.row, image: None, negative: ending.negative }))
            })
            .await;
        if let Some(Err(why)) = ended {
            warn!(build = %id, %why, "a build that was cut off cannot be gone on with");
        }
        self.clear(id).await;
    }

    async fn remove_images(&self) -> Result<(), StoreError> {
        let images = self.ports.store.all_images(self.ports.engine.name()).await?;
        let wishes = wishes(&self.ports.store.prebuilds().await?);
        let going: HashSet<ImageId> = retention::plan(&images, &wishes, self.rules())
            .into_iter()
            .inspect(|(image, why)| info!(%image, ?why, "an image goes"))
            .map(|(id, _)| id)
            .collect();
        let now = self.now();
        for image in images {
            if self.stopping.is_cancelled() {
                return Ok(());
            }
            let waits = image.removal.not_before.is_some_and(|at| at > now);
            match image.state {
                ImageState::Deleting if !waits => self.remove_artifact(&image).await?,
                ImageState::Deleted if since(now, image.last_used_at) >= self.rules().ended_kept => {
                    self.ports.store.delete_image(image.id, image.version).await?;
                }
                _ if going.contains(&image.id) => self.begin_removal(&image).await?,
                _ => {}
            }
        }
        Ok(())
    }

    async fn begin_removal(&self, image: &Image) -> Result<(), StoreError> {
        if let Ok(Some(deleting)) = removal::remove(image, Insistence::IfUnused)
            && let Some(deleting) = self.write_image(image, deleting).await?
        {
            self.remove_artifact(&deleting).await?;
        }
        Ok(())
    }

    /// Removes the artifact of an image that is Deleting. It is Deleted only when the engine says that nothing is there.
    pub(super) async fn remove_artifact(&self, image: &Image) -> Result<(), StoreError> {
        let engine = &self.ports.engine;
        let gone = match self.in_time(engine.remove(&image.artifact)).await {
            Err(error) => Err(error),
            Ok(()) => match self.in_time(engine.lookup(&image.artifact)).await {
                Ok(None) => Ok(()),
                Ok(Some(_)) => Err("the engine removed it, and it is still there".to_owned()),
                Err(error) => Err(error),
            },
        };
        let next = match gone {
            Ok(()) => match image.becoming(ImageState::Deleted) {
                Ok(deleted) => deleted,
                Err(illegal) => {
                    warn!(image = %image.id, %illegal, "an image is not removed");
                    return Ok(());
                }
            },
            Err(error) => {
                warn!(image = %image.id, error, "the artifact is removed later");
                removal::not_removed(image, error, self.rules(), self.now())
            }
        };
        self.write_image(image, next).await.map(drop)
    }

    /// The row as written, or `None` when somebody was faster.
    pub(super) async fn write_image(&self, before: &Image, next: Image) -> Result<Option<Image>, StoreError> {
        let next = Image { version: before.version + 1, ..next };
        if self.ports.store.advance_image(before.version, &next).await? == Advance::Lost {
            return Ok(None);
        }
        if before.state != next.state {
            info!(image = %next.id, from = before.state.word(), to = next.state.word(), "image");
        }
        self.ports.observer.image_changed(&next);
        Ok(Some(next))
    }

    async fn forget_ended(&self) -> Result<(), StoreError> {
        let (now, rules, store) = (self.now(), self.rules(), &self.ports.store);
        let before =
            Timestamp::clamped(now.as_millis() - i64::try_from(rules.ended_kept.as_millis()).unwrap_or(0));
        let rows = store.ended_builds(self.ports.engine.name(), before).await?;
        if !rows.is_empty() {
            let images = store.all_images(self.ports.engine.name()).await?;
            let with_image: BTreeSet<ImageBuildId> =
                images.iter().map(|image| image.image_build_id).collect();
            let pointed: BTreeSet<ImageBuildId> =
                store.prebuilds().await?.iter().filter_map(|p| p.seen.as_ref()?.build).collect();
            for row in rows {
                let (has, pointed) = (with_image.contains(&row.id), pointed.contains(&row.id));
                if retention::forgettable(&row, has, pointed, rules, now)
                    && let Err(error) = self.forget(&row).await
                {
                    warn!(build = %row.id, error, "the build is forgotten later");
                }
            }
        }
        let memory = i64::try_from(rules.negative_memory.as_millis()).unwrap_or(0);
        store.prune_negatives(Timestamp::clamped(now.as_millis() - memory)).await.map(drop)
    }
}

fn wishes(prebuilds: &[Prebuild]) -> BTreeMap<Lineage, Wish> {
    let mut wishes: BTreeMap<Lineage, Wish> = BTreeMap::new();
    for prebuild in prebuilds {
        let Some(seen) = &prebuild.seen else { continue };
        let wish = wishes.entry(seen.lineage.clone()).or_default();
        wish.fresh |= prebuild.enabled;
        wish.keep = wish.keep.max(prebuild.keep);
    }
    wishes
}
