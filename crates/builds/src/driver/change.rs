//! Writing rows: the row as it is, a pure decision, a conditional write; again if somebody was faster.

use std::sync::Arc;

use sandglass_sandbox::ImageBuildId;
use tokio::sync::watch;
use tracing::{info, warn};

use super::{BuildError, Builds, Driver, Ended};
use crate::{
    build::{BuildState, Cause, CauseKind, ImageBuild},
    decide::attempt::Stopped,
    ports::{Advance, Commit, NegativeChange, NewImage, StoreError},
};

/// What a decision wants written.
#[derive(Debug, Clone)]
pub(super) struct Draft {
    pub(super) row: ImageBuild,
    pub(super) image: Option<NewImage>,
    pub(super) negative: Option<NegativeChange>,
}

impl From<ImageBuild> for Draft {
    fn from(row: ImageBuild) -> Self {
        Self { row, image: None, negative: None }
    }
}

/// Why a row was not changed.
#[derive(Debug)]
pub(super) enum Unchanged<E> {
    NotFound,
    /// The decision said no.
    Refused(E),
    Store(StoreError),
}

impl Driver {
    /// Changes a row. `decide` may be asked several times, and after an error the caller may not know whether it was written: it answers
    /// `None` when the row is as wanted already.
    pub(super) async fn change<E>(
        &self,
        id: ImageBuildId,
        decide: impl Fn(&ImageBuild) -> Result<Option<Draft>, E>,
    ) -> Result<ImageBuild, Unchanged<E>> {
        loop {
            let row = self.ports.store.build(id).await.map_err(Unchanged::Store)?;
            let row = row.ok_or(Unchanged::NotFound)?;
            self.watches.tell(&row);
            let Some(mut draft) = decide(&row).map_err(Unchanged::Refused)? else { return Ok(row) };
            draft.row.version = row.version + 1;
            let commit = Commit {
                expected: row.version,
                build: &draft.row,
                image: draft.image.as_ref(),
                negative: draft.negative.as_ref(),
            };
            if self.ports.store.commit(commit).await.map_err(Unchanged::Store)? == Advance::Written {
                self.written(&row, &draft);
                return Ok(draft.row);
            }
        }
    }

    /// Changes a row, however long the store fails; `None` when this server stops meanwhile.
    pub(super) async fn change_at_last<E>(
        &self,
        id: ImageBuildId,
        decide: impl Fn(&ImageBuild) -> Result<Option<Draft>, E>,
    ) -> Option<Result<ImageBuild, E>> {
        loop {
            match self.change(id, &decide).await {
                Ok(row) => return Some(Ok(row)),
                Err(Unchanged::Refused(why)) => return Some(Err(why)),
                Err(Unchanged::NotFound) => return None,
                Err(Unchanged::Store(error)) => self.store_failed(id, &error).await?,
            }
        }
    }

    /// A change of the owner's, which ends when it is the owner no more; `None` when this server stops meanwhile.
    pub(super) async fn own_change(
        &self,
        id: ImageBuildId,
        decide: impl Fn(&ImageBuild) -> Result<Option<ImageBuild>, Stopped>,
    ) -> Option<Result<ImageBuild, Stopped>> {
        self.change_at_last(id, |row| Ok(decide(row)?.map(Draft::from))).await
    }

    /// Waits a moment; `None` when this server stops.
    pub(super) async fn store_failed(&self, id: ImageBuildId, error: &StoreError) -> Option<()> {
        warn!(build = %id, %error, "the store failed; trying again");
        tokio::select! {
            () = tokio::time::sleep(self.settings.store_retry) => Some(()),
            () = self.stopping.cancelled() => None,
        }
    }

    fn written(&self, before: &ImageBuild, draft: &Draft) {
        let row = &draft.row;
        if before.state != row.state {
            let cause = row.cause.as_ref().map_or("", |cause| cause.kind.word());
            info!(build = %row.id, from = before.state.word(), to = row.state.word(), cause, "image build");
        }
        self.ports.observer.build_changed(Some(before), row);
        if let Some(new) = &draft.image {
            self.ports.observer.image_changed(&new.image);
        }
        self.watches.tell(row);
    }

    /// The row and every later one that this process learns of.
    pub(super) async fn follow(
        &self,
        id: ImageBuildId,
    ) -> Result<(ImageBuild, watch::Receiver<Option<Arc<ImageBuild>>>), BuildError> {
        // Watching first: a change between the two is seen twice rather than not at all.
        let changes = self.watches.watch(id);
        let row = self.ports.store.build(id).await?.ok_or(BuildError::NotFound)?;
        self.watches.tell(&row);
        Ok((row, changes))
    }
}

impl Builds {
    /// The build as the store has it.
    ///
    /// # Errors
    /// When there is none, or the store cannot be read.
    pub async fn build(&self, id: ImageBuildId) -> Result<ImageBuild, BuildError> {
        self.driver.ports.store.build(id).await?.ok_or(BuildError::NotFound)
    }

    /// The build as it is, and as it becomes: the latest row, perhaps leaving out some between. Changes that another server writes are not
    /// among them.
    ///
    /// # Errors
    /// When there is none, or the store cannot be read.
    pub async fn subscribe(
        &self,
        id: ImageBuildId,
    ) -> Result<(ImageBuild, watch::Receiver<Option<Arc<ImageBuild>>>), BuildError> {
        self.driver.follow(id).await
    }

    /// Returns when the build ended, with its image or the cause that all who waited get.
    ///
    /// # Errors
    /// When there is no such build, the store cannot be read, or this server stops.
    pub async fn wait(&self, id: ImageBuildId) -> Result<Ended, BuildError> {
        let row = self.driver.ended(id).await?;
        let image = match row.image {
            Some(image) => self.driver.ports.store.image(image).await?,
            None => None,
        };
        let lost = || Cause::new(CauseKind::Rejected, "its image was removed since");
        Ok(match (row.state, image) {
            (BuildState::Succeeded, Some(image)) => Ok(Box::new(image)),
            _ => Err(row.cause.unwrap_or_else(lost)),
        })
    }
}

impl Driver {
    /// The build when it ended.
    pub(super) async fn ended(&self, id: ImageBuildId) -> Result<ImageBuild, BuildError> {
        loop {
            let (row, mut changes) = self.follow(id).await?;
            if row.state.terminal() {
                return Ok(row);
            }
            let ended = changes.wait_for(|row| row.as_ref().is_some_and(|row| row.state.terminal()));
            tokio::select! {
                ended = ended => if let Ok(Some(row)) = ended.as_deref() {
                    return Ok(ImageBuild::clone(row));
                },
                // Another server may work on it, whose changes are only in the store.
                () = tokio::time::sleep(self.settings.sweep_every) => {}
                () = self.stopping.cancelled() => return Err(BuildError::Stopping),
            }
        }
    }
}
