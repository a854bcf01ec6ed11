//! Undoing what builds left: build sandboxes, artifacts that no image took over, held images, secrets.

use sandglass_sandbox::ImageBuildId;
use tracing::{info, warn};

use super::{Driver, change::Draft, work::holder};
use crate::{
    build::ImageBuild,
    decide::recover::{self, Due},
    key::ArtifactName,
    ports::{Advance, EngineError},
};

impl Driver {
    /// Carries out what the row owes and strikes it off. What fails stays owed.
    pub(super) async fn clear(&self, id: ImageBuildId) {
        let row = match self.ports.store.build(id).await {
            Ok(Some(row)) => row,
            Ok(None) => return,
            Err(error) => return warn!(build = %id, %error, "what the build left is cleared later"),
        };
        let mut done = Vec::new();
        for due in recover::due(&row, self.now()) {
            if self.stopping.is_cancelled() {
                return;
            }
            match self.undo(&row, &due).await {
                Ok(true) => done.push(due),
                Ok(false) => {}
                Err(error) => warn!(build = %id, ?due, error, "what the build left is cleared later"),
            }
        }
        if done.is_empty() {
            return;
        }
        let cleared = |row: &ImageBuild| {
            let next = recover::done(row, &done);
            Ok::<_, std::convert::Infallible>((next != *row).then(|| Draft::from(next)))
        };
        self.change_at_last(id, cleared).await;
    }

    /// Removes the build sandbox of an attempt that is over, written or not: it may be what fills the disk of the store. It stays owed.
    pub(super) async fn let_go(&self, id: ImageBuildId, attempt: u32) {
        if let Err(error) = self.in_time(self.ports.engine.discard(id, attempt)).await {
            warn!(build = %id, attempt, error, "the build sandbox is removed later");
        }
    }

    /// Whether it is over for good.
    async fn undo(&self, row: &ImageBuild, due: &Due) -> Result<bool, String> {
        match due {
            Due::Discard { attempt } => {
                self.in_time(self.ports.engine.discard(row.id, *attempt)).await?;
                Ok(true)
            }
            Due::RemoveArtifact { name, settled } => Ok(self.remove_left(row.id, name).await? && *settled),
            Due::Release { image } => {
                let released = self.ports.store.release(*image, &holder(row.id), self.now()).await;
                released.map(|()| true).map_err(|error| error.to_string())
            }
            Due::ForgetSecrets => {
                self.ports.vault.forget(row.id).await.map(|()| true).map_err(|error| error.to_string())
            }
        }
    }

    /// Removes the artifact if this build made it; whether nothing of the build's is there.
    async fn remove_left(&self, id: ImageBuildId, name: &ArtifactName) -> Result<bool, String> {
        let ours = |found: Option<crate::ports::Artifact>| {
            found.is_some_and(|artifact| artifact.made_by.is_some_and(|(build, _)| build == id))
        };
        if !ours(self.in_time(self.ports.engine.lookup(name)).await?) {
            return Ok(true);
        }
        self.in_time(self.ports.engine.remove(name)).await?;
        info!(build = %id, %name, "an artifact that no image took over was removed");
        Ok(!ours(self.in_time(self.ports.engine.lookup(name)).await?))
    }

    /// A removal or look must not take for ever.
    pub(super) async fn in_time<T>(
        &self,
        call: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, String> {
        match tokio::time::timeout(self.settings.removal_deadline, call).await {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err("the engine does not answer".to_owned()),
        }
    }

    /// Forgets an ended build with its log. The log goes first: a row without a log is looked at again, a log without a row is not.
    pub(super) async fn forget(&self, row: &ImageBuild) -> Result<(), String> {
        self.ports.logs.remove(row.id).await.map_err(|error| error.to_string())?;
        match self.ports.store.delete_build(row.id, row.version).await {
            Ok(Advance::Written | Advance::Lost) => Ok(()),
            Err(error) => Err(error.to_string()),
        }
    }
}
