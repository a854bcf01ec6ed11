//! Pools of boxes that were started ahead.
//!
//! Owns the pools, as the store has them, and what is known of boxes that wait: they are in no index, so that no list, expiry or request
//! about a sandbox ever meets them. Does not own their existence, which is the runtime's: a box carries the mark of its pool.
//!
//! Invariants: the id of a warm box is that of the sandbox that it becomes, so an assignment is a create under that id, and whatever a
//! crash leaves of it is carried on like any create; a box is offered only while nothing is wanted of its id.

mod claims;
mod work;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use sandglass_sandbox::{
    ImageId, SandboxId, Timestamp,
    pool::{Capacity, Pool},
    ports::{
        StoreError,
        runtime::{Condition, Observation},
        store::Advance,
    },
    source::FoundImage,
};
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use super::Engine;

pub use claims::Claimed;
pub(super) use claims::line;
pub(super) use work::spawn;

/// Why a pool could not be had as asked.
#[derive(Debug, thiserror::Error)]
pub enum PoolError {
    #[error("there is no pool {0}")]
    NotFound(String),
    #[error("there is a pool {0} already")]
    Exists(String),
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A pool as it is.
#[derive(Debug, Clone)]
pub struct PoolView {
    pub pool: Arc<Pool>,
    /// Boxes that wait and fit the pool as it is now.
    pub available: u64,
    /// Boxes that are being started.
    pub starting: u64,
    /// Sandboxes that name the pool, wherever their boxes came from.
    pub allocated: u64,
    /// Since the last start that succeeded, what went wrong with the last one.
    pub failure: Option<PoolFailure>,
    /// Of a pool of a repository: what the runtime takes as the image of its boxes, once it is known.
    pub image: Option<String>,
}

/// A start that failed.
#[derive(Debug, Clone)]
pub struct PoolFailure {
    pub message: String,
    pub at: Timestamp,
    /// In a row.
    pub count: u32,
}

#[derive(Debug)]
struct Known {
    pool: Arc<Pool>,
    /// What its image stands for, when it was last looked at.
    image: Option<String>,
    /// Of a pool of a repository: the image that was found last, in this process.
    found: Option<FoundImage>,
    /// The newest image of its repository when it was last looked for one. Another one makes it look again.
    newest: Option<ImageId>,
    /// There is a newer image of its repository: the next start looks for it.
    behind: bool,
    failure: Option<PoolFailure>,
    /// Nothing is started before then.
    not_before: Option<Timestamp>,
    /// It had too few and is being filled to the middle of its buffer.
    filling: bool,
    /// Cancelled when the pool is deleted.
    over: CancellationToken,
}

/// A box that this process is starting.
#[derive(Debug)]
struct Starting {
    pool: String,
    /// Its image is looked for, or built: that takes its time, and nothing of this machine.
    finding: bool,
}

#[derive(Debug)]
struct Warm {
    observed: Arc<Observation>,
    /// A create has taken it, or it is being removed.
    taken: bool,
    /// A create that came to nothing had it, so nobody else gets it.
    spent: bool,
}

#[derive(Debug, Default)]
struct Registry {
    pools: BTreeMap<String, Known>,
    boxes: HashMap<SandboxId, Warm>,
    /// Boxes that this process is starting.
    starting: HashMap<SandboxId, Starting>,
    /// Boxes that this process is removing.
    removing: HashSet<SandboxId>,
}

/// See the module documentation.
#[derive(Debug, Default)]
pub(super) struct Pools {
    registry: Mutex<Registry>,
    /// Rung when something may have to be started or removed.
    changed: Notify,
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A box with the mark of a pool was seen.
    fn observe(&self, observed: Observation, taken: bool) {
        let mut registry = self.lock();
        let known = registry.boxes.get(&observed.id);
        if known.is_some_and(|known| known.observed.revision >= observed.revision) {
            return;
        }
        let taken = taken || known.is_some_and(|known| known.taken);
        let spent = known.is_some_and(|known| known.spent);
        let changed = known.is_none_or(|known| known.observed.condition != observed.condition);
        registry.boxes.insert(observed.id, Warm { observed: Arc::new(observed), taken, spent });
        drop(registry);
        if changed {
            self.changed.notify_one();
        }
    }

    /// The box is a sandbox now, or gone.
    fn forget(&self, id: SandboxId) -> bool {
        let known = self.lock().boxes.remove(&id).is_some();
        if known {
            self.changed.notify_one();
        }
        known
    }

    /// Boxes that are known, with the revision of what is known: what a full list must confirm.
    pub(super) fn boxes(&self) -> Vec<(SandboxId, u64)> {
        self.lock().boxes.iter().map(|(id, warm)| (*id, warm.observed.revision)).collect()
    }

    /// The box was not in a list that is newer than `revision`; whether it was known.
    pub(super) fn missed(&self, id: SandboxId, revision: u64) -> bool {
        let mut registry = self.lock();
        let missed = registry.boxes.get(&id).is_some_and(|warm| warm.observed.revision == revision);
        if missed {
            registry.boxes.remove(&id);
            drop(registry);
            self.changed.notify_one();
        }
        missed
    }

    /// Boxes that are or will be there and are no sandboxes.
    pub(super) fn held(&self) -> usize {
        let registry = self.lock();
        let waiting = registry.boxes.iter().filter(|(id, warm)| {
            !warm.taken && !registry.starting.contains_key(id) && !registry.removing.contains(id)
        });
        waiting.count() + registry.starting.len()
    }
}

impl Engine {
    /// Reads the pools. Before boxes are looked at.
    pub(super) async fn recall_pools(&self) -> Result<(), StoreError> {
        let pools = self.store.pools().await?;
        let mut registry = self.pools.lock();
        for pool in pools {
            registry.pools.insert(pool.name.clone(), known(pool));
        }
        Ok(())
    }

    /// Whether a box waits under this id, or will.
    pub fn waits(&self, id: SandboxId) -> bool {
        let registry = self.pools.lock();
        registry.boxes.contains_key(&id) || registry.starting.contains_key(&id)
    }

    /// Takes in what was seen of a box that carries the mark of a pool.
    pub(super) fn observe_warm(&self, observed: Observation) {
        let id = observed.id;
        let entry = self.index.get(id);
        // Told late: it is a sandbox by now, or was one.
        if entry.as_ref().is_some_and(|e| e.observed.is_some()) || self.index.is_gone(id) {
            return;
        }
        let found = observed.spec.source.as_ref().and_then(|source| source.found.as_ref());
        if let (Some(provisioner), Some(found)) = (self.provisioner(), found) {
            provisioner.adopt_ahead(id, found);
        }
        self.pools.observe(observed, entry.is_some());
    }

    /// The box of this id waits no longer.
    pub(super) fn forget_warm(&self, id: SandboxId) -> bool {
        self.pools.forget(id)
    }

    /// Makes a pool; its boxes are started in the background.
    ///
    /// # Errors
    /// `Exists`, or when the store cannot be written.
    pub async fn create_pool(&self, pool: Pool) -> Result<PoolView, PoolError> {
        if self.store.insert_pool(&pool).await? == Advance::Lost {
            return Err(PoolError::Exists(pool.name));
        }
        let name = pool.name.clone();
        self.pools.lock().pools.insert(name.clone(), known(pool));
        self.pools.changed.notify_one();
        self.pool(&name)
    }

    /// Gives a pool other bounds.
    ///
    /// # Errors
    /// `NotFound`, or when the store cannot be written.
    pub async fn resize_pool(&self, name: &str, capacity: Capacity) -> Result<PoolView, PoolError> {
        let absent = || PoolError::NotFound(name.to_owned());
        let mut pool = self.pool(name)?.pool.as_ref().clone();
        pool.capacity = capacity;
        if self.store.replace_pool(&pool).await? == Advance::Lost {
            return Err(absent());
        }
        if let Some(known) = self.pools.lock().pools.get_mut(name) {
            known.pool = Arc::new(pool);
        }
        self.pools.changed.notify_one();
        self.pool(name)
    }

    /// Removes a pool. Boxes that wait in it are removed in the background, sandboxes stay.
    ///
    /// # Errors
    /// `NotFound`, or when the store cannot be written.
    pub async fn delete_pool(&self, name: &str) -> Result<(), PoolError> {
        let absent = || PoolError::NotFound(name.to_owned());
        self.pool(name)?;
        let deleted = self.store.delete_pool(name).await?;
        if let Some(known) = self.pools.lock().pools.remove(name) {
            known.over.cancel();
        }
        self.pools.changed.notify_one();
        if deleted == Advance::Lost { Err(absent()) } else { Ok(()) }
    }

    /// One pool.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn pool(&self, name: &str) -> Result<PoolView, PoolError> {
        let absent = || PoolError::NotFound(name.to_owned());
        let allocated = self.index.allocated().remove(name).unwrap_or(0);
        let registry = self.pools.lock();
        let known = registry.pools.get(name).ok_or_else(absent)?;
        Ok(self.view(&registry, known, allocated))
    }

    /// Every pool, by name.
    pub fn all_pools(&self) -> Vec<PoolView> {
        let allocated = self.index.allocated();
        let registry = self.pools.lock();
        let of = |known: &Known| allocated.get(&known.pool.name).copied().unwrap_or(0);
        registry.pools.values().map(|known| self.view(&registry, known, of(known))).collect()
    }

    /// Whether there is any pool.
    pub fn has_pools(&self) -> bool {
        !self.pools.lock().pools.is_empty()
    }

    fn view(&self, registry: &Registry, known: &Known, allocated: u64) -> PoolView {
        let name = &known.pool.name;
        let starting = registry.starting.values().filter(|starting| starting.pool == *name).count();
        PoolView {
            pool: known.pool.clone(),
            available: self.offered(registry, known).count() as u64,
            starting: starting as u64,
            allocated,
            failure: known.failure.clone(),
            image: known.found.as_ref().map(|found| found.reference.clone()),
        }
    }

    /// The boxes that a create may take.
    fn offered<'a>(
        &'a self,
        registry: &'a Registry,
        known: &'a Known,
    ) -> impl Iterator<Item = (SandboxId, &'a Warm)> {
        let revision = known.pool.revision();
        registry.boxes.iter().filter_map(move |(id, warm)| {
            let mark = warm.observed.spec.standby.as_ref()?;
            let fits = mark.pool == known.pool.name
                && mark.revision == revision
                && known.image.as_ref().is_none_or(|image| *image == mark.image)
                && warm.observed.condition == Condition::Running
                && !warm.taken
                && !warm.spent
                // What is wanted of its id may be older than this process.
                && self.index.get(*id).is_none();
            fits.then_some((*id, warm))
        })
    }
}

fn known(pool: Pool) -> Known {
    Known {
        pool: Arc::new(pool),
        image: None,
        found: None,
        newest: None,
        behind: false,
        failure: None,
        not_before: None,
        filling: false,
        over: CancellationToken::new(),
    }
}
