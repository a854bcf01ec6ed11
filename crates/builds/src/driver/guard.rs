//! Calls of the engine under the lease: ended when the build is to end, its time is up, or somebody else owns it.

use std::{panic::AssertUnwindSafe, pin::pin, time::Duration};

use futures_util::FutureExt;
use tracing::warn;

use super::{Driver, change::Unchanged};
use crate::{
    build::ImageBuild,
    decide::{
        attempt::{self, Stopped},
        ending::Outcome,
    },
    ports::{EngineError, Job},
};

/// Why an owner's work ended before its call did.
#[derive(Debug)]
pub(super) enum Break {
    Engine(EngineError),
    Outcome(Outcome),
    /// Somebody else owns the build, or it was cut off with this server: nothing is written about it any more.
    NotMine,
}

impl From<Stopped> for Break {
    fn from(why: Stopped) -> Self {
        match why {
            Stopped::Cancelled(why) => Self::Outcome(Outcome::Cancelled(why)),
            Stopped::Fenced => Self::NotMine,
            Stopped::Illegal(illegal) => Self::Engine(EngineError::Rejected(illegal.to_string())),
        }
    }
}

impl Driver {
    /// Waits for the call and keeps the lease meanwhile. When it has to end, the job's token is cancelled, and the call is dropped after the grace.
    pub(super) async fn guarded<T>(
        &self,
        row: &ImageBuild,
        job: &Job,
        call: impl Future<Output = Result<T, EngineError>>,
    ) -> Result<T, Break> {
        let mut call = pin!(AssertUnwindSafe(call).catch_unwind());
        let why = tokio::select! {
            returned = &mut call => return match returned {
                Ok(result) => result.map_err(Break::Engine),
                Err(_) => Err(Break::Engine(EngineError::Rejected("the engine gave up".to_owned()))),
            },
            why = self.kept(row) => why,
        };
        job.cancelled.cancel();
        if tokio::time::timeout(self.settings.stop_grace, call).await.is_err() {
            warn!(build = %row.id, "the engine did not let go of the build in time");
        }
        Err(why)
    }

    /// Keeps the lease until there is a reason to end.
    async fn kept(&self, row: &ImageBuild) -> Break {
        let (fence, rules) = (row.last_fence, self.rules());
        let mut deadline = row.deadline_at;
        let mut believed = row.lease.as_ref().map_or(self.now(), |lease| lease.until);
        let mut changes = self.watches.watch(row.id);
        let period = rules.lease / 3;
        loop {
            let left = self.now().until(deadline);
            if left.is_zero() {
                return Break::Outcome(Outcome::PastDeadline);
            }
            tokio::select! {
                () = tokio::time::sleep(left.min(period)) => {}
                changed = changes.changed() => {
                    if changed.is_err() {
                        // It ended, which the row will say; or nobody was told for a while.
                        changes = self.watches.watch(row.id);
                    }
                    let told = changes.borrow_and_update().clone();
                    match told.map(|row| attempt::going_on(&row, fence)) {
                        Some(Err(why)) => return why.into(),
                        _ => continue,
                    }
                }
                () = self.stopping.cancelled() => return Break::NotMine,
            }
            let now = self.now();
            let renewed =
                self.change(row.id, |row| Ok(Some(attempt::renew(row, fence, rules, now)?.into()))).await;
            match renewed {
                Ok(row) => {
                    deadline = row.deadline_at;
                    believed = row.lease.map_or(believed, |lease| lease.until);
                }
                Err(Unchanged::Refused(why)) => return Break::from(Stopped::clone(&why)),
                Err(Unchanged::NotFound) => return Break::NotMine,
                // Others may take it over from then on.
                Err(Unchanged::Store(_)) if believed <= self.now() => return Break::NotMine,
                Err(Unchanged::Store(error)) => warn!(build = %row.id, %error, "the lease was not renewed"),
            }
        }
    }

    /// Waits as long as the engine asked for, under the lease.
    pub(super) async fn pause(&self, row: &ImageBuild, job: &Job, wait: Duration) -> Result<(), Break> {
        let sleep = async {
            tokio::time::sleep(wait).await;
            Ok(())
        };
        self.guarded(row, job, sleep).await
    }
}
