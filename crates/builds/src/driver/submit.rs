//! Requests for images, waiters who leave, and cancelling.

use sandglass_sandbox::{ImageBuildId, Timestamp};
use tracing::{info, warn};

use super::{
    BuildError, Builds, Driver,
    change::{Draft, Unchanged},
};
use crate::{
    build::{BuildState, Cancel, IllegalTransition, ImageBuild, Obligation, Origin, Slot},
    decide::{
        admit::{Admission, Ask, Facts, admit},
        attempt,
        removal::{self, Insistence},
        waiters::{self, Joining},
    },
    image::{Image, Lineage},
    ports::{Advance, Inserted},
    submission::{Fit, Joined, Match, Policy, Refusal, Submission, Submitted},
    time::after,
};

/// Other requests that may come between before this one gives up.
const ROUNDS: usize = 64;

impl Builds {
    /// Finds the request an image, or a build to wait for. With a waiter, the image is held for it, or it is among the build's waiters, when
    /// this returns; asking again is harmless.
    ///
    /// # Errors
    /// When the request is refused, or the store fails. A build may have begun although the answer was lost: asking again joins it.
    pub async fn submit(&self, submission: Submission) -> Result<Submitted, BuildError> {
        if self.driver.stopping.is_cancelled() {
            return Err(BuildError::Stopping);
        }
        let slot = self.driver.slot(&submission);
        if submission.force {
            self.driver.ports.store.forget_negative(&slot).await?;
        }
        self.driver.submitted(&submission, &slot).await
    }

    /// The waiter does not wait any more, or does not need the image that it waited for. The last one to leave ends a build that was begun for
    /// waiters only. Not having waited is success.
    ///
    /// # Errors
    /// When there is no such build, or the store fails.
    pub async fn leave(&self, id: ImageBuildId, waiter: &str) -> Result<(), BuildError> {
        let now = self.driver.now();
        let row =
            self.driver.requested(id, |row| Ok(waiters::leave(row, waiter, now)?.map(Draft::from))).await?;
        if let Some(image) = row.image {
            self.driver.ports.store.release(image, waiter, now).await?;
        }
        Ok(())
    }

    /// Ends the build, now or as soon as its engine let go of it. Answers the row that says so.
    ///
    /// # Errors
    /// [`BuildError::Terminal`] when it ended already.
    pub async fn cancel(&self, id: ImageBuildId) -> Result<ImageBuild, BuildError> {
        let row = self.build(id).await?;
        if row.state.terminal() {
            return Err(BuildError::Terminal(Box::new(row)));
        }
        self.driver.cancel(id, Cancel::Requested).await
    }
}

impl Driver {
    pub(super) fn slot(&self, submission: &Submission) -> Slot {
        Slot {
            namespace: submission.namespace.clone(),
            runtime: self.ports.engine.name().to_owned(),
            key: submission.resolved.key.clone(),
        }
    }

    /// Decides until nobody comes between.
    pub(super) async fn submitted(
        &self,
        submission: &Submission,
        slot: &Slot,
    ) -> Result<Submitted, BuildError> {
        for _ in 0..ROUNDS {
            if let Some(submitted) = self.round(submission, slot).await? {
                return Ok(submitted);
            }
        }
        Err(BuildError::Busy)
    }

    /// One try; `None` when somebody else came between.
    async fn round(&self, submission: &Submission, slot: &Slot) -> Result<Option<Submitted>, BuildError> {
        let facts = self.facts(submission, slot).await?;
        let ask = Ask {
            policy: submission.policy,
            fit: submission.fit,
            force: submission.force,
            key: &slot.key,
            platform: &submission.resolved.plan.platform,
        };
        match admit(ask, &facts, self.now()) {
            Admission::Use { image, fit, refresh } => self.used(submission, image, fit, refresh).await,
            Admission::Join(id) => self.join(submission, id).await,
            Admission::After(id) => {
                self.ended(id).await?;
                Ok(None)
            }
            Admission::Start => self.begin_build(submission, slot).await,
            Admission::WithoutImage => Ok(Some(Submitted::WithoutImage)),
            Admission::Refuse(refusal) => Err(refusal.into()),
        }
    }

    async fn facts(&self, submission: &Submission, slot: &Slot) -> Result<Facts, BuildError> {
        let store = &self.ports.store;
        let lineage = Lineage {
            namespace: slot.namespace.clone(),
            runtime: slot.runtime.clone(),
            recipe_key: submission.resolved.recipe_key.clone(),
        };
        // In flight first: a build that ends meanwhile is then seen as its image, never as nothing.
        let in_flight = store.in_flight(slot).await?;
        let tagged = match &submission.tag {
            None => None,
            Some(name) => {
                let repository = &submission.resolved.plan.repository_key;
                match store.tag(slot.namespace.as_deref(), repository, name).await? {
                    Some(tag) => {
                        store.image(tag.image).await?.filter(|image| image.lineage.runtime == slot.runtime)
                    }
                    None => None,
                }
            }
        };
        Ok(Facts {
            lineage: store.images_of(&lineage).await?,
            tagged,
            in_flight,
            negative: store.negative(slot).await?,
        })
    }

    /// Whether somebody removed the artifact behind our back, as prunings of an engine do. Nobody begins to use the image then; another one is
    /// built. An engine that does not say counts as having it.
    async fn is_gone(&self, image: &Image) -> Result<bool, BuildError> {
        if !matches!(self.in_time(self.ports.engine.lookup(&image.artifact)).await, Ok(None)) {
            return Ok(false);
        }
        warn!(image = %image.id, artifact = %image.artifact, "an image is not there any more; another one is built");
        self.change_image(image.id, |image| removal::remove(image, Insistence::Force)).await?;
        self.dirt.notify_one();
        Ok(true)
    }

    async fn used(
        &self,
        submission: &Submission,
        image: Box<Image>,
        fit: Fit,
        refresh: bool,
    ) -> Result<Option<Submitted>, BuildError> {
        if self.is_gone(&image).await? {
            return Ok(None);
        }
        if let Some(waiter) = &submission.waiter
            && self.ports.store.acquire(image.id, waiter, self.now()).await? == Advance::Lost
        {
            return Ok(None);
        }
        // The image serves without it, so nothing that is wrong with the refresh is this request's trouble.
        let refreshing =
            if refresh { Box::pin(self.refresh(submission)).await.unwrap_or(None) } else { None };
        Ok(Some(Submitted::Image { image, fit, refreshing }))
    }

    /// Begins the build of the commit that was asked for, unless it is under way.
    async fn refresh(&self, submission: &Submission) -> Result<Option<ImageBuildId>, BuildError> {
        let background = Submission {
            policy: Policy::IfMissing,
            fit: Match::Exact,
            force: false,
            tag: None,
            origin: Origin::Refresh,
            waiter: None,
            ..submission.clone()
        };
        let slot = self.slot(&background);
        match self.submitted(&background, &slot).await? {
            Submitted::Build { build, .. } => Ok(Some(build.id)),
            Submitted::Image { .. } | Submitted::WithoutImage => Ok(None),
        }
    }

    async fn join(&self, submission: &Submission, id: ImageBuildId) -> Result<Option<Submitted>, BuildError> {
        let joining = Joining {
            waiter: submission.waiter.clone(),
            independent: submission.origin.independent(),
            priority: Some(submission.origin.priority()),
            tags: submission.tags(),
        };
        let joined = self
            .change(id, |row| match waiters::join(row, &joining) {
                None => Err(()),
                Some(next) if next == *row => Ok(None),
                Some(next) => Ok(Some(Draft::from(next))),
            })
            .await;
        match joined {
            Ok(row) => Ok(Some(Submitted::Build { build: Box::new(row), joined: Joined::Joined })),
            Err(Unchanged::Store(error)) => Err(error.into()),
            Err(Unchanged::Refused(()) | Unchanged::NotFound) => Ok(None),
        }
    }

    async fn begin_build(
        &self,
        submission: &Submission,
        slot: &Slot,
    ) -> Result<Option<Submitted>, BuildError> {
        let (store, vault) = (&self.ports.store, &self.ports.vault);
        let rows = store.open_builds(&slot.runtime).await?;
        if rows.iter().filter(|row| row.state == BuildState::Queued).count() >= self.rules().queue {
            return Err(Refusal::QueueFull(self.rules().queue).into());
        }
        let row = self.fresh(submission, slot, self.now());
        if row.plan.confidential {
            vault.put(row.id, &submission.resolved.confidential).await?;
        }
        // Before the row, after which it may end and its log be closed at any time.
        self.open_log(row.id).await;
        match store.insert_build(&row).await {
            Ok(Inserted::Written) => {}
            Ok(Inserted::InFlight(other)) if other == row.id => {}
            Ok(Inserted::InFlight(_)) => {
                self.forget_unwritten(&row).await;
                return Ok(None);
            }
            Err(error) => {
                if let Ok(None) = store.build(row.id).await {
                    self.forget_unwritten(&row).await;
                }
                // It may have been written all the same, and then it has to have its turn.
                self.turn.notify_one();
                return Err(error.into());
            }
        }
        info!(build = %row.id, key = %row.slot.key, "image build accepted");
        self.ports.observer.build_changed(None, &row);
        self.turn.notify_one();
        Ok(Some(Submitted::Build { build: Box::new(row), joined: Joined::Began }))
    }

    /// What was laid out for a build that did not come to be.
    async fn forget_unwritten(&self, row: &ImageBuild) {
        if let Err(error) = self.ports.logs.remove(row.id).await {
            warn!(build = %row.id, %error, "an empty log stays");
        }
        if row.plan.confidential
            && let Err(error) = self.ports.vault.forget(row.id).await
        {
            warn!(build = %row.id, %error, "the vault keeps what no build needs");
        }
    }

    fn fresh(&self, submission: &Submission, slot: &Slot, now: Timestamp) -> ImageBuild {
        let resolved = &submission.resolved;
        let mut plan = resolved.plan.clone();
        plan.confidential |= !resolved.confidential.is_empty();
        let obligations = if plan.confidential { vec![Obligation::Secrets] } else { Vec::new() };
        ImageBuild {
            id: ImageBuildId::random(),
            version: 1,
            slot: slot.clone(),
            recipe_key: resolved.recipe_key.clone(),
            steps: attempt::fresh_steps(plan.recipe.kind, now),
            plan,
            origin: submission.origin,
            independent: submission.origin.independent(),
            priority: submission.origin.priority(),
            tags: submission.tags(),
            metadata: submission.metadata.clone(),
            timeout_seconds: submission.timeout.as_secs().max(1),
            state: BuildState::Queued,
            cause: None,
            last_transition_at: now,
            waiters: submission.waiter.iter().cloned().collect(),
            cancel: None,
            attempt: 0,
            transient_failures: 0,
            interruptions: 0,
            not_before: None,
            lease: None,
            last_fence: 0,
            parent_image: None,
            artifact: None,
            image: None,
            obligations,
            created_at: now,
            queued_at: now,
            started_at: None,
            finished_at: None,
            deadline_at: after(now, self.rules().queue_deadline),
        }
    }

    /// Wishes the end of a build; one that ended already stays as it is.
    pub(super) async fn cancel(&self, id: ImageBuildId, why: Cancel) -> Result<ImageBuild, BuildError> {
        let now = self.now();
        self.requested(id, |row| {
            if row.state.terminal() || row.cancel.is_some() {
                return Ok(None);
            }
            waiters::cancel(row, why, now).map(Draft::from).map(Some)
        })
        .await
    }

    /// A change that somebody outside asked for.
    async fn requested(
        &self,
        id: ImageBuildId,
        decide: impl Fn(&ImageBuild) -> Result<Option<Draft>, IllegalTransition>,
    ) -> Result<ImageBuild, BuildError> {
        let row = self.change(id, decide).await.map_err(|why| match why {
            Unchanged::NotFound => BuildError::NotFound,
            Unchanged::Refused(illegal) => illegal.into(),
            Unchanged::Store(error) => error.into(),
        })?;
        if row.state.terminal() {
            self.close_log(id).await;
        }
        self.turn.notify_one();
        // What it leaves is cleared away if it ended with this.
        self.dirt.notify_one();
        Ok(row)
    }
}
