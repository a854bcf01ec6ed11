//! Boxes that wait in a pool for sandboxes from repositories: the image that each is made of, held under the id that its sandbox will have,
//! and the files that are shown in it, empty until it is assigned.
//!
//! Owns what is held for such boxes. What exists is the runtime's knowledge: a box carries what was found for it, and whoever meets it after
//! a restart says so here.

use std::{
    collections::{BTreeMap, HashMap},
    sync::{MutexGuard, PoisonError},
};

use sandglass_repository::RepositorySpec;
use sandglass_sandbox::{
    ImageBuildId, ImageId, SandboxId,
    lifecycle::{
        boot::{Failure, Reason},
        intent::Progress,
    },
    pool::Pool,
    ports::{
        RuntimeErrorKind,
        runtime::{Delivery, RuntimeError},
    },
    source::{FoundImage, ImageNews},
};
use serde_json::Value;

use super::{SecretFiles, Workspaces, images::Wanted, secrets::resolved};

/// What is held for one box beyond what its sandbox's desk knows of.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Held {
    pub build: Option<ImageBuildId>,
    pub image: Option<ImageId>,
}

fn unusable(message: impl std::fmt::Display) -> Failure {
    Failure::new(Reason::RuntimeError, format!("the pool's repository cannot be used: {message}"))
}

impl Workspaces {
    fn ahead(&self) -> MutexGuard<'_, HashMap<SandboxId, Held>> {
        self.ahead.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn held_ahead(&self, id: SandboxId) -> Option<Held> {
        self.ahead().get(&id).copied()
    }

    pub(super) fn forget_ahead(&self, id: SandboxId) {
        self.ahead().remove(&id);
    }

    /// See `Provisioner::find_ahead`.
    pub(super) async fn image_ahead(&self, id: SandboxId, pool: &Pool) -> Result<FoundImage, Failure> {
        let source = pool.source().ok_or_else(|| unusable("it has none"))?;
        let asked = self.with_named_secrets(pool.repository.clone()).await?;
        let asked: RepositorySpec = serde_json::from_value(asked).map_err(unusable)?;
        let repository = self.images.check(&asked).map_err(unusable)?;
        let platform = pool.template.platform.as_ref().map(|p| format!("{}/{}", p.os, p.arch));
        let wanted = Wanted {
            sandbox: id,
            namespace: source.namespace.as_deref(),
            asked: source,
            repository: &repository,
            build_secrets: &BTreeMap::new(),
            platform: platform.as_deref(),
        };
        let noted = |news: ImageNews| {
            if let ImageNews::Stands(Progress::Queued { build } | Progress::Building { build }) = news {
                self.ahead().entry(id).or_default().build = Some(build);
            }
        };
        let found = self.images.find(wanted, &noted).await?;
        self.ahead().insert(id, Held { build: found.build, image: found.image });
        Ok(found)
    }

    /// A pool keeps names of secrets; what they stand for is read whenever it is needed.
    async fn with_named_secrets(&self, repository: Value) -> Result<Value, Failure> {
        let folder = self.settings.secrets_dir.clone();
        let read =
            tokio::task::spawn_blocking(move || resolved(repository, SecretFiles(folder.as_deref()), None));
        read.await.map_err(unusable)?.map_err(unusable)
    }

    /// See `Provisioner::deliver_ahead`.
    pub(super) fn files_ahead(&self, id: SandboxId) -> Result<Vec<Delivery>, RuntimeError> {
        self.folders.keep_empty(id).map_err(|e| {
            let message = format!("the files of a box that is started ahead cannot be made: {e}");
            RuntimeError::new(RuntimeErrorKind::Failed, "channel", message)
        })?;
        Ok(self.folders.delivery(id, true))
    }

    /// See `Provisioner::adopt_ahead`.
    pub(super) fn held_already(&self, id: SandboxId, found: &FoundImage) {
        self.ahead().entry(id).or_insert(Held { build: found.build, image: found.image });
    }

    /// See `Provisioner::leave_ahead`.
    pub(super) async fn let_go_ahead(&self, id: SandboxId) -> Result<(), RuntimeError> {
        let Some(held) = self.held_ahead(id) else { return Ok(()) };
        let kept = self.desk(id).map(|desk| desk.kept());
        let (build, image) = kept.map_or((None, None), |kept| (kept.build, kept.image));
        // What the sandbox has itself by now is not let go of: a hold has no count.
        if held.image.is_none() || held.image != image {
            let build = held.build.filter(|of| Some(*of) != build);
            self.images.release(id, build, held.image).await.map_err(not_released)?;
        }
        self.forget_ahead(id);
        Ok(())
    }
}

pub(super) fn not_released(message: String) -> RuntimeError {
    let message = format!("its image is not released: {message}");
    RuntimeError::new(RuntimeErrorKind::Failed, "channel", message)
}
