//! Work for this loop: boxes that a pool lacks, and boxes that no pool wants. Not its work: a box that a create has taken. Twice at once:
//! impossible, there is one task. Idle cost: one pass over pools and their boxes every 5 s.
//!
//! What it does is decided anew from what exists, so nothing of it is written down: a box that was started for a server that died carries
//! its mark and is found by the next one, and one that was only half made is removed.

use std::{sync::Arc, time::Duration};

use sandglass_sandbox::{
    SandboxId,
    pool::{Pool, pause_after},
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, RuntimeError, StartPlan},
    },
    source::FoundImage,
    spec::{MutableFacts, Secrets, Spec},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::{Engine, Known, PoolFailure, Registry, Starting};
use crate::engine::commit::token;

/// Between two looks when nothing rings; also how soon a moved image is seen.
const PERIOD: Duration = Duration::from_secs(5);
/// Boxes that are started ahead at the same time, of all pools: creates that somebody waits for go first.
const PARALLEL: usize = 2;

pub(in crate::engine) fn spawn(engine: &Arc<Engine>) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let stopping = engine_.stopping.clone();
        loop {
            run(&engine_).await;
            tokio::select! {
                () = engine_.pools.changed.notified() => {}
                () = tokio::time::sleep(PERIOD) => {}
                () = stopping.cancelled() => return,
            }
        }
    });
}

async fn run(engine: &Arc<Engine>) {
    // What is known may be old while the runtime is away.
    if engine.reachable().is_err() {
        return;
    }
    look_at_images(engine).await;
    for id in unwanted(engine) {
        remove(engine, id);
    }
    while let Some((id, next)) = next_start(engine) {
        let engine = engine.clone();
        let tasks = engine.tasks.clone();
        tasks.spawn(async move { start(&engine, id, next).await });
    }
}

async fn look_at_images(engine: &Engine) {
    let pools: Vec<Arc<Pool>> = engine.pools.lock().pools.values().map(|known| known.pool.clone()).collect();
    for pool in pools.iter().filter(|pool| pool.template.source.is_none()) {
        // An image that is absent will be fetched by the next start.
        let Ok(image) = engine.runtime.image_identity(&pool.template.image).await else { continue };
        if let Some(known) = engine.pools.lock().pools.get_mut(&pool.name) {
            known.image = (!image.is_empty()).then_some(image);
        }
    }
    for pool in pools.iter().filter(|pool| pool.template.source.is_some()) {
        look_at_builds(engine, pool).await;
    }
}

/// Whether there is an image of the pool's repository that is newer than that of its boxes. Whether it serves is found out by the next start:
/// it may be of another branch.
async fn look_at_builds(engine: &Engine, pool: &Pool) {
    let Some(provisioner) = engine.provisioner() else { return };
    let found = {
        let registry = engine.pools.lock();
        let known = registry.pools.get(&pool.name).and_then(|known| known.found.clone());
        // Since the server began, perhaps none was started.
        known.or_else(|| of_its_boxes(&registry, pool))
    };
    let Some(found) = found else { return };
    let Some(has) = found.image else {
        // They are of the recipe's base, which is an image like any other.
        let Ok(image) = engine.runtime.image_identity(&found.reference).await else { return };
        if let Some(known) = engine.pools.lock().pools.get_mut(&pool.name) {
            known.image = (!image.is_empty()).then_some(image);
        }
        return;
    };
    let Some(newest) = provisioner.newest(has).await else { return };
    if let Some(known) = engine.pools.lock().pools.get_mut(&pool.name) {
        known.behind = newest != has && known.newest != Some(newest);
    }
}

/// What the pool's boxes are made of, as they say.
fn of_its_boxes(registry: &Registry, pool: &Pool) -> Option<FoundImage> {
    let of_pool = registry
        .boxes
        .values()
        .filter(|warm| warm.observed.spec.standby.as_ref().is_some_and(|mark| mark.pool == pool.name));
    let newest = of_pool.max_by_key(|warm| warm.observed.created_at)?;
    newest.observed.spec.source.as_ref()?.found.clone()
}

/// Boxes that wait for nothing any more: of no pool, stale, ended, frozen, half made, or too many.
fn unwanted(engine: &Engine) -> Vec<SandboxId> {
    let allocated = engine.index.allocated();
    let mut registry = engine.pools.lock();
    let mut found = Vec::new();
    for known in registry.pools.values() {
        let mut offered: Vec<_> =
            engine.offered(&registry, known).map(|(id, warm)| (warm.observed.created_at, id)).collect();
        let in_use = allocated.get(&known.pool.name).copied().unwrap_or(0);
        let wanted = known.pool.capacity.wanted(offered.len() as u64, in_use, false);
        // The newest go: the oldest have shown that they last.
        offered.sort_unstable();
        found.extend(
            offered.into_iter().skip(usize::try_from(wanted).unwrap_or(usize::MAX)).map(|(_, id)| id),
        );
    }
    for (id, warm) in &registry.boxes {
        let ours = registry.starting.contains_key(id) || warm.taken || engine.index.get(*id).is_some();
        if !ours && !found.contains(id) && !serves(&registry, *id) {
            found.push(*id);
        }
    }
    found.retain(|id| !registry.removing.contains(id));
    for id in &found {
        registry.removing.insert(*id);
        if let Some(warm) = registry.boxes.get_mut(id) {
            warm.taken = true;
        }
    }
    found
}

/// Whether a box is as its pool wants it.
fn serves(registry: &Registry, id: SandboxId) -> bool {
    let Some(warm) = registry.boxes.get(&id) else { return false };
    let Some(mark) = &warm.observed.spec.standby else { return false };
    let Some(known) = registry.pools.get(&mark.pool) else { return false };
    warm.observed.condition == Condition::Running
        && !warm.spent
        && mark.revision == known.pool.revision()
        && known.image.as_ref().is_none_or(|image| *image == mark.image)
}

/// Removes a box that was taken and is of use to nobody.
pub(super) fn discard(engine: &Arc<Engine>, id: SandboxId) {
    let mut registry = engine.pools.lock();
    if let Some(warm) = registry.boxes.get_mut(&id) {
        warm.spent = true;
    }
    let free = registry.removing.insert(id);
    drop(registry);
    if free {
        remove(engine, id);
    }
}

fn remove(engine: &Arc<Engine>, id: SandboxId) {
    let engine_ = engine.clone();
    engine.tasks.spawn(async move {
        let mut removed = engine_.runtime.remove(id, Duration::ZERO).await;
        if let (Ok(()), Some(provisioner)) = (&removed, engine_.provisioner()) {
            removed = provisioner.forget(id).await;
        }
        match &removed {
            Ok(()) => {
                info!(sandbox = %id, "a box that waited in a pool is removed");
                engine_.index.remember_gone(id);
            }
            Err(error) => {
                warn!(sandbox = %id, %error, "a box that waited in a pool could not be removed; trying again");
            }
        }
        let mut registry = engine_.pools.lock();
        registry.removing.remove(&id);
        if removed.is_ok() {
            registry.boxes.remove(&id);
        } else if let Some(warm) = registry.boxes.get_mut(&id) {
            warm.taken = false;
        }
        drop(registry);
        // A failure waits for the next period.
        if removed.is_ok() {
            engine_.pools.changed.notify_one();
        }
    });
}

/// The next box to start, noted as being started.
fn next_start(engine: &Engine) -> Option<(SandboxId, Start)> {
    if engine.stopping.is_cancelled() {
        return None;
    }
    let (now, allocated) = (engine.clock.now(), engine.index.allocated());
    let max = engine.settings.max_sandboxes;
    let (there, held) = (engine.index.len(), engine.pools.held());
    let mut registry = engine.pools.lock();
    let at_work = registry.starting.values().filter(|starting| !starting.finding).count();
    if at_work >= PARALLEL || (max > 0 && there + held >= max) {
        return None;
    }
    let mut chosen = None;
    let names: Vec<String> = registry.pools.keys().cloned().collect();
    for name in names {
        let Some(known) = registry.pools.get(&name) else { continue };
        let of_it = || registry.starting.values().filter(|starting| starting.pool == name);
        let (starting, finding) = (of_it().count() as u64, of_it().any(|starting| starting.finding));
        let have = engine.offered(&registry, known).count() as u64 + starting;
        let in_use = allocated.get(&name).copied().unwrap_or(0);
        let filling = have < known.pool.capacity.wanted(have, in_use, known.filling);
        if let Some(known) = registry.pools.get_mut(&name) {
            known.filling = filling;
            // Who looks for an image looks for it alone: the others start when it is there.
            let may = known.not_before.is_none_or(|at| at <= now) && !finding;
            if (filling || known.behind) && may && chosen.is_none() {
                chosen = Some(Start { pool: known.pool.clone(), filling, over: known.over.clone() });
            }
        }
    }
    let start = chosen?;
    let id = SandboxId::random();
    let finding = start.pool.source().is_some();
    registry.starting.insert(id, Starting { pool: start.pool.name.clone(), finding });
    Some((id, start))
}

/// A box to start.
struct Start {
    pool: Arc<Pool>,
    /// The pool lacks a box; otherwise one is started only if there is another image for it.
    filling: bool,
    over: CancellationToken,
}

impl Start {
    /// The pool, unless it was deleted meanwhile: there may be another one of its name.
    fn of<'a>(&self, registry: &'a mut Registry) -> Option<&'a mut Known> {
        if self.over.is_cancelled() {
            return None;
        }
        registry.pools.get_mut(&self.pool.name)
    }
}

async fn start(engine: &Arc<Engine>, id: SandboxId, next: Start) {
    let pool = &next.pool;
    let started = make(engine, id, &next).await;
    if let Err(error) = &started {
        warn!(pool = pool.name, %error, "a box could not be started ahead");
    }
    if matches!(started, Ok(Made::Unfinished)) {
        return;
    }
    if !matches!(started, Ok(Made::Started)) {
        // By contract nothing is left; if something is after all, it carries the mark and is found.
        let _ = engine.runtime.remove(id, Duration::ZERO).await;
        if let Some(provisioner) = engine.provisioner()
            && let Err(error) = provisioner.forget(id).await
        {
            warn!(sandbox = %id, %error, "what was kept for a box that was not started stays until the next start");
        }
    }
    let now = engine.clock.now();
    let mut registry = engine.pools.lock();
    registry.starting.remove(&id);
    if let Some(known) = registry.pools.get_mut(&pool.name) {
        match started {
            Ok(_) => (known.failure, known.not_before) = (None, None),
            Err(error) => {
                let count = known.failure.as_ref().map_or(0, |failure| failure.count) + 1;
                known.not_before = now.checked_add(pause_after(count));
                known.failure = Some(PoolFailure { message: error.to_string(), at: now, count });
            }
        }
    }
    drop(registry);
    engine.pools.changed.notify_one();
}

/// What came of starting a box.
enum Made {
    Started,
    NotNeeded,
    /// The server ends. What is waited for goes on: the next server asks for it again.
    Unfinished,
}

async fn make(engine: &Arc<Engine>, id: SandboxId, next: &Start) -> Result<Made, RuntimeError> {
    let (pool, secrets) = (&next.pool, Secrets::default());
    let found = match pool.source() {
        Some(_) => tokio::select! {
            found = find(engine, id, next) => Some(found?),
            () = next.over.cancelled() => return Ok(Made::NotNeeded),
            () = engine.stopping.cancelled() => return Ok(Made::Unfinished),
        },
        None => None,
    };
    let mut template: Spec = pool.template.clone();
    if let Some(found) = &found {
        template.image.clone_from(&found.reference);
    }
    engine.runtime.prepare(&template, &secrets, &|_| {}).await?;
    let image = engine.runtime.image_identity(&template.image).await?;
    if !noted(engine, id, next, (&image, found.as_ref())) {
        return Ok(Made::NotNeeded);
    }
    let (spec, delivery) = match found {
        Some(found) => (pool.standby_of(found, image), of_repositories(engine)?.deliver_ahead(id)?),
        None => (pool.standby(image), Vec::new()),
    };
    let plan = StartPlan {
        spec,
        facts: MutableFacts::default(),
        created_at: engine.clock.now(),
        // Neither is ever told to anybody: the sandbox gets its own.
        agent_token: token(),
        route_token: token(),
        delivery,
        root_agent: pool.source().is_some(),
    };
    let Ok(_slot) = engine.starting.acquire().await else { return Ok(Made::Unfinished) };
    let observed = engine.runtime.start(id, &plan, &secrets).await?;
    engine.observe_warm(observed);
    Ok(Made::Started)
}

fn of_repositories(engine: &Engine) -> Result<&Arc<dyn crate::engine::provision::Provisioner>, RuntimeError> {
    engine.provisioner().ok_or_else(|| {
        let message = "this server makes no sandboxes from repositories any more";
        RuntimeError::new(RuntimeErrorKind::Failed, "image", message)
    })
}

/// The image of a pool's repository, which may have to be built first.
async fn find(engine: &Engine, id: SandboxId, next: &Start) -> Result<FoundImage, RuntimeError> {
    let provisioner = of_repositories(engine)?;
    let found = provisioner.find_ahead(id, &next.pool).await.map_err(|failure| {
        let message = format!("{}: {}", failure.reason.word(), failure.message);
        RuntimeError::new(RuntimeErrorKind::Failed, "image", message)
    })?;
    let newest = match found.image {
        Some(image) => provisioner.newest(image).await,
        None => None,
    };
    if let Some(known) = next.of(&mut engine.pools.lock()) {
        (known.newest, known.behind) = (newest, false);
    }
    Ok(found)
}

/// Keeps what the pool's boxes are made of from now on; whether the box is still needed.
fn noted(
    engine: &Engine,
    id: SandboxId,
    next: &Start,
    (identity, found): (&str, Option<&FoundImage>),
) -> bool {
    let mut registry = engine.pools.lock();
    if let Some(starting) = registry.starting.get_mut(&id) {
        starting.finding = false;
    }
    let Some(known) = next.of(&mut registry) else { return false };
    let identity = Some(identity).filter(|identity| !identity.is_empty());
    let same = is_same(known, identity, found);
    known.image = identity.map(str::to_owned);
    known.found = found.cloned();
    let needed = next.filling || !same;
    drop(registry);
    if !same {
        // Boxes of before are of no use any more.
        engine.pools.changed.notify_one();
    }
    needed
}

/// Whether the pool's boxes were made of this, as far as this process knows.
fn is_same(known: &Known, identity: Option<&str>, found: Option<&FoundImage>) -> bool {
    let before = known.found.as_ref().map(|found| &found.reference);
    known.image.as_deref() == identity && before == found.map(|found| &found.reference)
}
