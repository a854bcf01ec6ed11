//! The driver: carries the decisions out over the ports.
//!
//! Owns the tasks that work on builds, and who is told of their changes. Does not own any fact that is not in the store: after a crash a new
//! driver goes on from the rows. Every write is the answer of a pure decision to the row as it is, conditional on the row's version.

mod change;
mod dispatch;
mod finish;
mod guard;
mod images;
mod owed;
mod prebuilds;
mod submit;
mod sweep;
mod watches;
mod work;

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use sandglass_sandbox::{Clock, ImageBuildId, PrebuildId, Timestamp};
use tokio::sync::Notify;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use crate::decide::recover::Takeover;
use crate::{
    build::{Cause, ImageBuild},
    decide::Rules,
    image::Image,
    ports::{BuildStore, Engine, Filters, Logs, Observer, Resolver, StoreError, Vault},
    submission::Refusal,
};

/// The world.
#[derive(Clone)]
pub struct Ports {
    pub store: Arc<dyn BuildStore>,
    pub engine: Arc<dyn Engine>,
    pub resolver: Arc<dyn Resolver>,
    pub logs: Arc<dyn Logs>,
    pub filters: Arc<dyn Filters>,
    pub vault: Arc<dyn Vault>,
    pub observer: Arc<dyn Observer>,
    pub clock: Arc<dyn Clock>,
}

/// How this process drives builds.
#[derive(Debug, Clone)]
pub struct Settings {
    pub rules: Rules,
    pub takeover: Takeover,
    /// Names one run of one server; never the same twice.
    pub owner: String,
    /// How long a call that was cancelled may take to return.
    pub stop_grace: Duration,
    /// Between two looks for what nobody ends, removes or releases.
    pub sweep_every: Duration,
    /// Before a store that failed is asked again.
    pub store_retry: Duration,
    /// How long a remote may take to answer.
    pub resolve_deadline: Duration,
    /// How long an engine may take to find or remove something.
    pub removal_deadline: Duration,
}

impl Settings {
    /// The usual numbers, for a server that is alone on its store.
    pub fn new(owner: impl Into<String>) -> Self {
        Self {
            rules: Rules::default(),
            takeover: Takeover::AtOnce,
            owner: owner.into(),
            stop_grace: Duration::from_secs(10),
            sweep_every: Duration::from_secs(15),
            store_retry: Duration::from_secs(1),
            resolve_deadline: Duration::from_secs(60),
            removal_deadline: Duration::from_secs(60),
        }
    }
}

/// Why a request was not carried out.
#[derive(Debug, thiserror::Error)]
pub enum BuildError {
    #[error("no such image build")]
    NotFound,
    #[error("no such image")]
    ImageNotFound,
    #[error("no such prebuild")]
    PrebuildNotFound,
    #[error("the image build ended already: it is {}", .0.state.word())]
    Terminal(Box<ImageBuild>),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the image is used by {0} sandboxes or builds; `force` removes it when they are done")]
    InUse(u64),
    #[error("the image is {} and cannot be used", .0.state.word())]
    Unusable(Box<Image>),
    #[error("builds are begun and ended faster than this request could join one; try again")]
    Busy,
    #[error("the server is stopping")]
    Stopping,
    #[error("the store failed: {0}")]
    Store(#[from] StoreError),
    #[error("{0}")]
    Illegal(#[from] crate::build::IllegalTransition),
}

/// How a build ended: its image, or why there is none.
pub type Ended = Result<Box<Image>, Cause>;

/// The builds of one server. Cheap to clone; the last clone that is dropped stops the work.
#[derive(Clone)]
pub struct Builds {
    pub(crate) driver: Arc<Driver>,
    _stop: Arc<StopOnDrop>,
}

struct StopOnDrop(CancellationToken);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

pub(crate) struct Driver {
    ports: Ports,
    settings: Settings,
    /// A build may have its turn now.
    turn: Notify,
    /// Something may have to be swept.
    dirt: Notify,
    /// A prebuild may be due.
    looks: Notify,
    stopping: CancellationToken,
    tasks: TaskTracker,
    watches: watches::Watches,
    /// Builds that a task of this process works on.
    mine: Mutex<HashSet<ImageBuildId>>,
    /// Prebuilds whose remote this process looks at.
    looking: Mutex<HashSet<PrebuildId>>,
}

impl Builds {
    /// Finishes or ends what earlier servers left, then begins to work.
    ///
    /// # Errors
    /// When the store cannot be read; nothing runs then.
    pub async fn start(ports: Ports, settings: Settings) -> Result<Self, StoreError> {
        let driver = Arc::new(Driver {
            ports,
            settings,
            turn: Notify::new(),
            dirt: Notify::new(),
            looks: Notify::new(),
            stopping: CancellationToken::new(),
            tasks: TaskTracker::new(),
            watches: watches::Watches::default(),
            mine: Mutex::default(),
            looking: Mutex::default(),
        });
        let builds = Self { _stop: Arc::new(StopOnDrop(driver.stopping.clone())), driver };
        builds.driver.recover(builds.driver.settings.takeover).await?;
        builds.driver.spawn_loops();
        Ok(builds)
    }

    /// Stops working and returns when nothing runs any more. Builds that were under way are begun again by the next server.
    pub async fn shut(&self) {
        self.driver.stopping.cancel();
        self.driver.tasks.close();
        self.driver.tasks.wait().await;
    }
}

impl Driver {
    fn now(&self) -> Timestamp {
        self.ports.clock.now()
    }

    fn rules(&self) -> &Rules {
        &self.settings.rules
    }

    fn mine(&self) -> MutexGuard<'_, HashSet<ImageBuildId>> {
        self.mine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn looking(&self) -> MutexGuard<'_, HashSet<PrebuildId>> {
        self.looking.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs the task unless this process works on the build already.
    fn spawn_for<F>(self: &Arc<Self>, id: ImageBuildId, task: impl FnOnce(Arc<Self>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        if self.stopping.is_cancelled() || !self.mine().insert(id) {
            return;
        }
        let held = Held { driver: self.clone(), id };
        let task = task(self.clone());
        self.tasks.spawn(async move {
            let _held = held;
            task.await;
        });
    }

    fn spawn_loops(self: &Arc<Self>) {
        let (turns, sweeps, looks) = (self.clone(), self.clone(), self.clone());
        self.tasks.spawn(async move { turns.give_turns().await });
        self.tasks.spawn(async move { sweeps.sweep_on().await });
        self.tasks.spawn(async move { looks.look_on().await });
    }
}

/// A build is this process's until the task ended, however it ends.
struct Held {
    driver: Arc<Driver>,
    id: ImageBuildId,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.driver.mine().remove(&self.id);
        // Not the sweep: what a task could not clear is left to the next regular one, or the two would keep each other busy.
        self.driver.turn.notify_one();
    }
}
