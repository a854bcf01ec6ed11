//! Taking a box out of a pool for a create, and what the driver of that create does with it.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    SandboxId,
    lifecycle::intent::{Create, Intent},
    pool::{Origin, told_late},
    ports::{
        RuntimeErrorKind,
        runtime::{Observation, RuntimeError, StartPlan},
    },
    spec::Spec,
};
use tracing::{info, warn};

use super::{Engine, PoolError};

/// A box that nobody else gets, until it is kept for its sandbox or let go by being dropped.
#[derive(Debug)]
pub struct Claimed {
    engine: Arc<Engine>,
    id: SandboxId,
    kept: bool,
    spent: bool,
}

impl Claimed {
    /// The id of the box, and of the sandbox that it will be.
    pub fn id(&self) -> SandboxId {
        self.id
    }

    /// The box was handed something of its sandbox's: nobody else gets it.
    pub(in crate::engine) fn spend(&mut self) {
        self.spent = true;
    }

    /// The create under its id is written down.
    pub(in crate::engine) fn keep(mut self) {
        self.kept = true;
        self.engine.pools.changed.notify_one();
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        if self.kept {
            return;
        }
        if self.spent {
            super::work::discard(&self.engine, self.id);
            return;
        }
        if let Some(warm) = self.engine.pools.lock().boxes.get_mut(&self.id) {
            warm.taken = false;
        }
        self.engine.pools.changed.notify_one();
    }
}

impl Engine {
    /// The oldest box of the pool that fits, and where the sandbox's box comes from.
    ///
    /// # Errors
    /// `NotFound` when there is no such pool.
    pub(in crate::engine) fn claim(
        self: &Arc<Self>,
        pool: &str,
        wanted: &Spec,
    ) -> Result<(Option<Claimed>, Origin), PoolError> {
        let cold = |why: &str| Origin::Cold { pool: pool.to_owned(), why: why.to_owned() };
        let mut registry = self.pools.lock();
        let known = registry.pools.get(pool).ok_or_else(|| PoolError::NotFound(pool.to_owned()))?;
        if let Err(why) = known.pool.fits(wanted) {
            return Ok((None, cold(&why)));
        }
        let oldest = self.offered(&registry, known).min_by_key(|(id, warm)| (warm.observed.created_at, *id));
        let Some((id, _)) = oldest else { return Ok((None, cold("no box is waiting"))) };
        if let Some(warm) = registry.boxes.get_mut(&id) {
            warm.taken = true;
        }
        let claimed = Claimed { engine: self.clone(), id, kept: false, spent: false };
        Ok((Some(claimed), Origin::Warm { pool: pool.to_owned() }))
    }

    /// Makes the box that waits under this id the sandbox of the plan. `None`: there is none, or it was of no use and is gone; a new one
    /// is to be made.
    pub(in crate::engine) async fn assign(
        self: &Arc<Self>,
        id: SandboxId,
        (intent, create): (&Intent, &Create),
        plan: &StartPlan,
    ) -> Result<Option<Observation>, RuntimeError> {
        let Some(Origin::Warm { pool }) = &create.origin else { return Ok(None) };
        // The runtime is asked, whatever is known here: after a restart that may be less.
        let assigned = match self.unfit(id, plan).await? {
            None => self.runtime.assign(id, plan).await,
            Some(why) => Err(RuntimeError::new(RuntimeErrorKind::Failed, "assign", why)),
        };
        let why = match assigned {
            Ok(observed) => {
                info!(sandbox = %id, pool, "assigned");
                self.forget_warm(id);
                return Ok(Some(observed));
            }
            Err(error) if error.retryable() => return Err(error),
            Err(error) if error.kind == RuntimeErrorKind::NotFound => {
                "its box went away meanwhile".to_owned()
            }
            Err(error) => {
                warn!(sandbox = %id, pool, %error, "a warm box could not be assigned; starting a new one");
                self.runtime.remove(id, Duration::ZERO).await?;
                error.message
            }
        };
        self.forget_warm(id);
        if let Some(provisioner) = self.provisioner() {
            provisioner.leave_ahead(id).await?;
        }
        self.announce(id, create, intent.accepted_at).await;
        self.note(id, MISSED, &missed(pool, &why)).await;
        Ok(None)
    }
}

impl Engine {
    /// Why the box that waits cannot become what was found for its sandbox meanwhile.
    async fn unfit(&self, id: SandboxId, plan: &StartPlan) -> Result<Option<String>, RuntimeError> {
        if plan.spec.source.is_none() {
            return Ok(None);
        }
        let waiting = self.runtime.inspect(id).await?.filter(|observed| observed.spec.standby.is_some());
        Ok(waiting.and_then(|waiting| {
            let (has, needs) = (&waiting.spec.image, &plan.spec.image);
            if has != needs {
                return Some(format!("its box is of image {has}, and {needs} was found for it"));
            }
            // With what the recipe gives, which was not known when it was claimed.
            told_late(&plan.spec).err()
        }))
    }
}

/// The kind of the line that says that a sandbox takes a box of its pool; its message is JSON.
pub(in crate::engine) const TAKEN: &str = "pool.taken";
/// The kind of the line that says that it got a new one, and why; likewise.
pub(in crate::engine) const MISSED: &str = "pool.missed";

fn missed(pool: &str, why: &str) -> String {
    serde_json::json!({ "pool": pool, "message": format!("the box is started anew: {why}") }).to_string()
}

/// The line of history about where a box comes from.
pub(in crate::engine) fn line(origin: &Origin) -> (&'static str, String) {
    match origin {
        Origin::Warm { pool } => (TAKEN, serde_json::json!({ "pool": pool }).to_string()),
        Origin::Cold { pool, why } => (MISSED, missed(pool, why)),
    }
}
