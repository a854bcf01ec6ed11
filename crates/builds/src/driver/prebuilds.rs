//! Prebuilds: looking at remotes when it is time, and asking for images of what is new.

use std::{
    collections::{BTreeMap, hash_map::RandomState},
    hash::BuildHasher,
    sync::Arc,
    time::Duration,
};

use sandglass_sandbox::{ImageBuildId, PrebuildId};
use tracing::{info, warn};

use super::{BuildError, Builds, Driver};
use crate::{
    build::{Cancel, Origin},
    decide::{
        prebuild::{self as decide, Look, Wanted},
        waiters,
    },
    image::Lineage,
    ports::Advance,
    prebuild::{Prebuild, Seen},
    submission::{Match, Policy, Refusal, Resolved, Submission, Submitted},
};

/// Remotes looked at the same time.
const LOOKS: usize = 4;
/// Between two looks at the list at most.
const LOOK_AT_LEAST: Duration = Duration::from_secs(5);

impl Builds {
    /// Somebody pushed to the repository. Pushes shortly after each other are answered by one look.
    ///
    /// # Errors
    /// When there is no such prebuild, or the store fails.
    pub async fn pushed(&self, id: PrebuildId) -> Result<Prebuild, BuildError> {
        let now = self.driver.now();
        self.driver.change_prebuild(id, |prebuild| decide::pushed(prebuild, now)).await
    }

    /// Looks at the remote at once, enabled or not, and builds what is there even if that failed before.
    ///
    /// # Errors
    /// When there is no such prebuild, or the store fails.
    pub async fn trigger(&self, id: PrebuildId) -> Result<Prebuild, BuildError> {
        self.driver.change_prebuild(id, decide::requested).await
    }

    /// Changes what somebody asked to change, and keeps what was seen. What looks at something else, or at other times, looks at once.
    ///
    /// # Errors
    /// When there is no such prebuild, or the store fails.
    pub async fn edit_prebuild(
        &self,
        id: PrebuildId,
        edit: impl Fn(&Prebuild) -> Prebuild,
    ) -> Result<Prebuild, BuildError> {
        let now = self.driver.now();
        let edited = |before: &Prebuild| {
            let mut next = edit(before);
            next.schedule = before.schedule.clone();
            let elsewhere = next.source != before.source || next.poll_seconds != before.poll_seconds;
            if elsewhere || (next.enabled && !before.enabled) {
                next.schedule.next_poll_at = Some(now);
            }
            next
        };
        self.driver.change_prebuild(id, edited).await
    }

    /// Adds a prebuild, whose first look is due at once if it is enabled.
    ///
    /// # Errors
    /// When the store fails.
    pub async fn add_prebuild(&self, mut prebuild: Prebuild) -> Result<Prebuild, BuildError> {
        prebuild.schedule.next_poll_at = Some(self.driver.now());
        self.driver.ports.store.insert_prebuild(&prebuild).await?;
        self.driver.looks.notify_one();
        Ok(prebuild)
    }

    /// Removes a prebuild. Its images stay, as those of others do.
    ///
    /// # Errors
    /// When there is no such prebuild, or the store fails.
    pub async fn remove_prebuild(&self, id: PrebuildId) -> Result<(), BuildError> {
        let store = &self.driver.ports.store;
        loop {
            let row = store.prebuild(id).await?.ok_or(BuildError::PrebuildNotFound)?;
            if store.delete_prebuild(id, row.version).await? == Advance::Written {
                return Ok(());
            }
        }
    }
}

impl Driver {
    pub(super) async fn look_on(self: Arc<Self>) {
        loop {
            let mut wait = LOOK_AT_LEAST;
            match self.ports.store.prebuilds().await {
                Ok(prebuilds) => {
                    let now = self.now();
                    for prebuild in prebuilds {
                        match decide::due_at(&prebuild, self.rules()) {
                            Some(at) if at <= now => self.spawn_look(prebuild.id),
                            Some(at) => wait = wait.min(now.until(at)),
                            None => {}
                        }
                    }
                }
                Err(error) => warn!(%error, "the prebuilds cannot be read; trying again"),
            }
            tokio::select! {
                () = self.looks.notified() => {}
                () = tokio::time::sleep(wait.max(Duration::from_millis(1))) => {}
                () = self.stopping.cancelled() => return,
            }
        }
    }

    fn spawn_look(self: &Arc<Self>, id: PrebuildId) {
        {
            let mut looking = self.looking();
            if looking.len() >= LOOKS || !looking.insert(id) {
                return;
            }
        }
        let held = Looking { driver: self.clone(), id };
        self.tasks.spawn(async move {
            let driver = held.driver.clone();
            let looked = tokio::select! {
                looked = driver.look(id) => looked,
                () = driver.stopping.cancelled() => return,
            };
            if let Err(error) = looked {
                warn!(prebuild = %id, %error, "the look at the remote is tried again");
                // Not at once: it is due still.
                tokio::select! {
                    () = tokio::time::sleep(driver.settings.store_retry) => {}
                    () = driver.stopping.cancelled() => {}
                }
            }
        });
    }

    async fn look(&self, id: PrebuildId) -> Result<(), BuildError> {
        let Some((row, look)) = self.begin_look(id).await? else { return Ok(()) };
        let resolved =
            tokio::time::timeout(self.settings.resolve_deadline, self.ports.resolver.resolve(&row));
        let seen = match resolved.await {
            Ok(Ok(resolved)) => Ok(self.answer(&row, look, resolved).await?),
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err("the remote does not answer".to_owned()),
        };
        let chance = u32::try_from(RandomState::new().hash_one(id) % 1000).unwrap_or(0);
        let now = self.now();
        self.change_prebuild(id, |row| {
            let row = decide::look_ended(row, look, self.rules(), chance, now);
            match &seen {
                Ok(Some(seen)) => decide::saw(&row, seen.clone()),
                Ok(None) => Prebuild { last_error: None, ..row },
                Err(error) => decide::unreadable(&row, error.clone()),
            }
        })
        .await?;
        Ok(())
    }

    /// `None` when it is not due any more, or somebody else looks.
    async fn begin_look(&self, id: PrebuildId) -> Result<Option<(Prebuild, Look)>, BuildError> {
        let patience = self.settings.resolve_deadline.saturating_mul(2);
        let now = self.now();
        let Some(row) = self.ports.store.prebuild(id).await? else { return Ok(None) };
        if decide::due_at(&row, self.rules()).is_none_or(|at| at > now) {
            return Ok(None);
        }
        let (mut next, look) = decide::look_began(&row, patience, now);
        next.version = row.version + 1;
        let written = self.ports.store.advance_prebuild(row.version, &next).await?;
        Ok((written == Advance::Written).then_some((next, look)))
    }

    /// Asks for the image of what is there. `None` when nothing new is to be remembered.
    async fn answer(
        &self,
        prebuild: &Prebuild,
        look: Look,
        resolved: Resolved,
    ) -> Result<Option<Seen>, BuildError> {
        let last = match prebuild.seen.as_ref().and_then(|seen| seen.build) {
            Some(build) => self.ports.store.build(build).await?,
            None => None,
        };
        if decide::wanted(prebuild, &resolved.key, last.as_ref(), look.asked) == Wanted::Nothing {
            return Ok(None);
        }
        let lineage = Lineage {
            namespace: prebuild.namespace.clone(),
            runtime: self.ports.engine.name().to_owned(),
            recipe_key: resolved.recipe_key.clone(),
        };
        let key = resolved.key.clone();
        let submission = Submission {
            namespace: prebuild.namespace.clone(),
            resolved,
            policy: Policy::IfMissing,
            fit: Match::Exact,
            force: false,
            tag: prebuild.tag.clone(),
            origin: Origin::Prebuild(prebuild.id),
            waiter: None,
            timeout: Duration::from_secs(prebuild.timeout_seconds),
            metadata: BTreeMap::new(),
        };
        let slot = self.slot(&submission);
        if look.asked {
            self.ports.store.forget_negative(&slot).await?;
        }
        let build = match self.submitted(&submission, &slot).await {
            Ok(Submitted::Build { build, .. }) => {
                info!(prebuild = %prebuild.id, build = %build.id, "a prebuild builds");
                self.supersede_older(build.id).await?;
                Some(build.id)
            }
            Ok(Submitted::Image { image, .. }) => {
                // Later, somebody may have moved the name elsewhere on purpose.
                if prebuild.seen.as_ref().is_none_or(|seen| seen.key != key) {
                    self.tag_found(prebuild, &image).await?;
                }
                None
            }
            Ok(Submitted::WithoutImage) => None,
            Err(BuildError::Refused(Refusal::FailedRecently { build, .. })) => Some(build),
            Err(error) => return Err(error),
        };
        Ok(Some(Seen { key, lineage, build, at: self.now() }))
    }

    /// An image that was there already gets the prebuild's name too.
    async fn tag_found(&self, prebuild: &Prebuild, image: &crate::image::Image) -> Result<(), BuildError> {
        let Some(name) = prebuild.tag.clone().filter(|name| !image.tags.contains(name)) else {
            return Ok(());
        };
        let tag = crate::image::Tag {
            namespace: prebuild.namespace.clone(),
            repository_key: image.repository_key.clone(),
            name,
            image: image.id,
            moved_at: self.now(),
        };
        self.ports.store.move_tag(&tag).await?;
        Ok(())
    }

    /// Ends builds of older commits that nobody waits for.
    async fn supersede_older(&self, newer: ImageBuildId) -> Result<(), BuildError> {
        let rows = self.ports.store.open_builds(self.ports.engine.name()).await?;
        let Some(newer) = rows.iter().find(|row| row.id == newer) else { return Ok(()) };
        for row in rows.iter().filter(|row| waiters::superseded_by(row, newer)) {
            self.cancel(row.id, Cancel::SupersededBy(newer.id)).await?;
        }
        Ok(())
    }

    async fn change_prebuild(
        &self,
        id: PrebuildId,
        decide: impl Fn(&Prebuild) -> Prebuild,
    ) -> Result<Prebuild, BuildError> {
        loop {
            let row = self.ports.store.prebuild(id).await?.ok_or(BuildError::PrebuildNotFound)?;
            let next = Prebuild { version: row.version + 1, ..decide(&row) };
            if self.ports.store.advance_prebuild(row.version, &next).await? == Advance::Written {
                self.looks.notify_one();
                return Ok(next);
            }
        }
    }
}

/// The remote is looked at until the task ended, however it ends.
struct Looking {
    driver: Arc<Driver>,
    id: PrebuildId,
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.driver.looking().remove(&self.id);
        self.driver.looks.notify_one();
    }
}
