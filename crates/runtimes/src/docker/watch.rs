//! Changes as the engine tells them, and what happens when it stops telling.
//!
//! An event is only a reason to look; what is reported is what the look shows. Invariant: after the engine was away everything is looked
//! at again before it counts as back, so that nothing that happened meanwhile is missed.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bollard::{models::EventMessage, query_parameters::EventsOptions};
use futures_util::{
    FutureExt, StreamExt,
    future::{FusedFuture, join_all},
    stream::BoxStream,
};
use sandglass_sandbox::{
    Clock, SandboxId, SnapshotId, SystemClock,
    ports::runtime::{BoxEvent, RuntimeEvent},
};
use tokio::{
    sync::mpsc::{UnboundedSender, unbounded_channel},
    task::AbortHandle,
    time::sleep,
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tracing::{debug, info, warn};

use super::{
    Shared,
    client::CONNECT_PATIENCE,
    errors::Failure,
    labels::{self, Parsed},
    reads::at,
    snapshot,
};

const SHORTEST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);
/// An engine that hangs ends no connection; it is asked for a sign of life so often.
const SIGN_OF_LIFE: Duration = Duration::from_secs(10);
/// Events of the last moments before the subscription are told again: better twice than not at all.
const OVERLAP: Duration = Duration::from_secs(3);
/// Events that are dealt with together, and how many boxes are looked at at once.
const BATCH: usize = 64;
/// A box that was being made when something happened to it is looked at again this much later.
const LATER: Duration = Duration::from_millis(50);

/// The one who is told.
#[derive(Default)]
pub(super) struct Watching(Mutex<Option<Watcher>>);

struct Watcher {
    tell: UnboundedSender<RuntimeEvent>,
    task: AbortHandle,
}

impl Watching {
    pub(super) fn tell(&self, event: RuntimeEvent) {
        if let Some(watcher) = &*self.0.lock().unwrap_or_else(PoisonError::into_inner) {
            // Nobody listening any more is no concern of ours.
            let _ = watcher.tell.send(event);
        }
    }

    fn replace(&self, watcher: Option<Watcher>) {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = std::mem::replace(&mut *held, watcher) {
            before.task.abort();
        }
    }

    /// Ends the task; the stream ends with it.
    pub(super) fn stop(&self) {
        self.replace(None);
    }
}

pub(super) fn watch(shared: &Arc<Shared>) -> BoxStream<'static, RuntimeEvent> {
    let (tell, told) = unbounded_channel();
    let task = tokio::spawn(follow(shared.clone(), tell.clone()));
    shared.watching.replace(Some(Watcher { tell, task: task.abort_handle() }));
    Box::pin(UnboundedReceiverStream::new(told))
}

async fn follow(shared: Arc<Shared>, tell: UnboundedSender<RuntimeEvent>) {
    let mut pause = SHORTEST_PAUSE;
    let mut lost = false;
    loop {
        let mut reached = false;
        let failure = tokio::select! {
            failure = shared.listen(&tell, lost, &mut reached) => failure,
            () = tell.closed() => return,
        };
        if reached {
            (pause, lost) = (SHORTEST_PAUSE, false);
        }
        shared.client.forget();
        if !lost {
            warn!(error = %failure, "the engine is lost");
            let _ = tell.send(RuntimeEvent::Lost(failure.during("engine")));
            lost = true;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// The snapshot that was just committed.
fn snapshot_of(event: &EventMessage) -> Option<SnapshotId> {
    if event.action.as_deref() != Some("commit") {
        return None;
    }
    snapshot::of_image(event.actor.as_ref()?.attributes.as_ref()?.get("imageRef")?)
}

/// Events about sandboxes from a moment ago on.
fn subscription() -> EventsOptions {
    let since = SystemClock.now().as_millis() / 1000 - i64::try_from(OVERLAP.as_secs()).unwrap_or(0);
    let filters = [("type", "container"), ("label", labels::ID)];
    EventsOptions {
        since: Some(since.to_string()),
        until: None,
        filters: Some(filters.map(|(key, value)| (key.to_owned(), vec![value.to_owned()])).into()),
    }
}

impl Shared {
    /// Follows the engine until it is lost. `reached` tells whether it was there at all.
    async fn listen(
        &self,
        tell: &UnboundedSender<RuntimeEvent>,
        was_lost: bool,
        reached: &mut bool,
    ) -> Failure {
        if let Err(failure) = self.sign_of_life().await {
            return failure;
        }
        tokio::select! {
            failure = self.hear(tell, was_lost, reached) => failure,
            failure = self.until_it_hangs() => failure,
        }
    }

    async fn hear(
        &self,
        tell: &UnboundedSender<RuntimeEvent>,
        was_lost: bool,
        reached: &mut bool,
    ) -> Failure {
        let docker = match self.client.engine().await {
            Ok(docker) => docker,
            Err(failure) => return failure,
        };
        let mut events = std::pin::pin!(docker.events(Some(subscription())).ready_chunks(BATCH));
        // Polled once before the list, so that the subscription is on its way first; what it brings is kept.
        let early = events.next().now_or_never().flatten();
        let present = match self.look_at_all(tell).await {
            Ok(present) => present,
            Err(failure) => return failure,
        };
        *reached = true;
        if was_lost {
            info!("the engine is back");
            let _ = tell.send(RuntimeEvent::Back);
        }
        let mut sweeping = std::pin::pin!(self.mend(&present).fuse());
        let mut later = BTreeSet::new();
        if let Some(failure) = self.take_batch(early.unwrap_or_default(), tell, &mut later).await {
            return failure;
        }
        loop {
            tokio::select! {
                batch = events.next() => {
                    let Some(batch) = batch else {
                        return Failure::Unreachable("it ended the stream of events".into());
                    };
                    if let Some(failure) = self.take_batch(batch, tell, &mut later).await {
                        return failure;
                    }
                }
                () = &mut sweeping, if !sweeping.is_terminated() => {}
                () = sleep(LATER), if !later.is_empty() => self.look_later(&mut later, tell).await,
            }
        }
    }

    /// Looks at the boxes that are not being made any more.
    async fn look_later(&self, later: &mut BTreeSet<SandboxId>, tell: &UnboundedSender<RuntimeEvent>) {
        let making = self.making().clone();
        let ready: Vec<_> = later.difference(&making).copied().collect();
        for id in ready {
            later.remove(&id);
            self.look_again(id, None, tell).await;
        }
    }

    /// A hanging engine ends no connection.
    async fn until_it_hangs(&self) -> Failure {
        loop {
            sleep(SIGN_OF_LIFE).await;
            if let Err(failure) = self.sign_of_life().await {
                return failure;
            }
        }
    }

    async fn sign_of_life(&self) -> Result<(), Failure> {
        let asked = self.client.call_within(CONNECT_PATIENCE, |docker| async move { docker.ping().await });
        asked.await.map(drop)
    }

    /// Everything afresh: all boxes there are, and that those known before and not there are gone.
    async fn look_at_all(&self, tell: &UnboundedSender<RuntimeEvent>) -> Result<HashSet<SandboxId>, Failure> {
        self.memory.forget_containers();
        let before = self.known().clone();
        let listed = self.observe_all().await.map_err(|error| Failure::Unreachable(error.message))?;
        let present: HashSet<SandboxId> = listed.iter().map(|o| o.id).collect();
        for observed in listed {
            let _ = tell.send(RuntimeEvent::Observed(Box::new(observed)));
        }
        for id in before {
            if !present.contains(&id) && !self.making().contains(&id) {
                info!(sandbox = %id, "a sandbox is gone");
                self.gone(id, None, tell).await;
            }
        }
        Ok(present)
    }

    /// The failure that ended the stream, if one did.
    async fn take_batch(
        &self,
        batch: Vec<Result<EventMessage, bollard::errors::Error>>,
        tell: &UnboundedSender<RuntimeEvent>,
        later: &mut BTreeSet<SandboxId>,
    ) -> Option<Failure> {
        let mut concerned: HashMap<SandboxId, Parsed> = HashMap::new();
        let mut committed = Vec::new();
        for event in batch {
            let event = match event {
                Ok(event) => event,
                Err(error) => match Failure::from(error) {
                    // One event that makes no sense says nothing about the others.
                    Failure::Unreadable(what) => {
                        debug!(what, "an event is not understood");
                        continue;
                    }
                    failure => return Some(failure),
                },
            };
            committed.extend(snapshot_of(&event));
            if let Some(parsed) = self.take(&event, tell, later) {
                concerned.insert(parsed.id, parsed);
            }
        }
        join_all(concerned.into_iter().map(|(id, parsed)| self.look_again(id, Some(parsed), tell))).await;
        for snapshot in committed {
            self.committed(snapshot).await;
        }
        None
    }

    /// The box that an event is a reason to look at.
    fn take(
        &self,
        event: &EventMessage,
        tell: &UnboundedSender<RuntimeEvent>,
        later: &mut BTreeSet<SandboxId>,
    ) -> Option<Parsed> {
        let action = event.action.as_deref()?;
        let parsed = labels::parse(event.actor.as_ref()?.attributes.as_ref()?)?;
        let id = parsed.id;
        let turned = matches!(action, "pause" | "unpause");
        let changes =
            turned || matches!(action, "create" | "start" | "die" | "destroy" | "restart" | "rename");
        if turned && let Some(at) = at(event) {
            self.memory.turned(id, at);
        }
        if action == "oom" {
            let at = at(event).unwrap_or_else(|| SystemClock.now());
            let message = "a process used more memory than the limit".to_owned();
            let told = BoxEvent { at, kind: "out_of_memory".to_owned(), message };
            let _ = tell.send(RuntimeEvent::Happened(id, told));
        }
        if !changes || self.memory.is_removing(id) {
            return None;
        }
        if self.making().contains(&id) {
            // Its maker tells of the start, and only of that.
            if !matches!(action, "create" | "start") {
                later.insert(id);
            }
            return None;
        }
        Some(parsed)
    }

    async fn look_again(&self, id: SandboxId, parsed: Option<Parsed>, tell: &UnboundedSender<RuntimeEvent>) {
        match self.observe(id).await {
            Ok(Some(observed)) => {
                let _ = tell.send(RuntimeEvent::Observed(Box::new(observed)));
            }
            Ok(None) => self.gone(id, parsed, tell).await,
            // If the engine is gone the stream says so; if not, the next full list finds the change.
            Err(failure) => debug!(sandbox = %id, error = %failure, "a sandbox could not be looked at"),
        }
    }

    /// The box is not there any more. If it was not us, what was made for it is removed here.
    async fn gone(&self, id: SandboxId, parsed: Option<Parsed>, tell: &UnboundedSender<RuntimeEvent>) {
        if self.known().remove(&id) {
            self.clean_after(id, parsed.as_ref()).await;
        }
        let _ = tell.send(RuntimeEvent::Removed(id));
    }
}
