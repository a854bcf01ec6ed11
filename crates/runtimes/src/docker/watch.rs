//! Changes as the engine tells them, and what happens when it stops telling.
//!
//! An event is only a reason to look; what is reported is what the look shows. Invariant: after the engine was away everything is looked
//! at again before it counts as back, so that nothing that happened meanwhile is missed.

use std::{
    collections::{BTreeSet, HashMap, HashSet},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use bollard::{Docker, errors::Error, models::EventMessage, query_parameters::EventsOptions};
use futures_util::{
    FutureExt, Stream, StreamExt,
    future::{FusedFuture, join_all},
    stream::{self, BoxStream},
};
use sandglass_sandbox::{
    Clock, SandboxId, SnapshotId, SystemClock, Timestamp,
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
    audit::Listening,
    client::CONNECT_PATIENCE,
    enforcer,
    errors::Failure,
    labels::{self, Parsed},
    lost,
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

/// Events about containers with that label from a moment ago on. The engine ends the stream only when it ends itself.
fn subscription(docker: &Docker, label: &str) -> impl Stream<Item = Result<EventMessage, Error>> + use<> {
    let since = SystemClock.now().as_millis() / 1000 - i64::try_from(OVERLAP.as_secs()).unwrap_or(0);
    let filters = [("type", "container"), ("label", label)];
    let options = EventsOptions {
        since: Some(since.to_string()),
        until: None,
        filters: Some(filters.map(|(key, value)| (key.to_owned(), vec![value.to_owned()])).into()),
    };
    let end = || Err(std::io::Error::other("it ended the stream of events").into());
    docker.events(Some(options)).chain(stream::once(async move { end() }))
}

/// A sidecar that tells events.
struct Started {
    key: String,
    id: SandboxId,
    at: Timestamp,
}

/// What one batch of events leaves to do.
#[derive(Default)]
struct Batch {
    /// Boxes to look at.
    concerned: HashMap<SandboxId, Option<Parsed>>,
    committed: Vec<SnapshotId>,
    sidecars: Vec<Started>,
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
        let boxes = Box::pin(subscription(&docker, labels::ID));
        let sidecars = Box::pin(subscription(&docker, labels::SIDECAR_FOR));
        let mut events = std::pin::pin!(stream::select(boxes, sidecars).ready_chunks(BATCH));
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
        let mut listening = Listening::default();
        match self.containers_with(enforcer::LABEL).await {
            Ok(sidecars) => listening.begin_all(&docker, &sidecars),
            Err(failure) => return failure,
        }
        let mut batch = early.unwrap_or_default();
        loop {
            match self.take_batch(std::mem::take(&mut batch), tell, &mut later).await {
                Ok(started) => {
                    for sidecar in started {
                        listening.begin(&docker, sidecar.id, &sidecar.key, sidecar.at);
                    }
                }
                Err(failure) => return failure,
            }
            tokio::select! {
                next = events.next() => batch = next.unwrap_or_default(),
                told = listening.next(), if !listening.is_empty() => {
                    if let Some((id, event)) = told {
                        let _ = tell.send(RuntimeEvent::Happened(id, event));
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
        let lost: Vec<SandboxId> = listed.iter().filter(|o| lost::is_lost(o)).map(|o| o.id).collect();
        for observed in listed {
            let _ = tell.send(RuntimeEvent::Observed(Box::new(observed)));
        }
        for id in lost {
            self.end_lost(id).await;
        }
        for id in before {
            if !present.contains(&id) && !self.making().contains(&id) {
                info!(sandbox = %id, "a sandbox is gone");
                self.gone(id, None, tell).await;
            }
        }
        Ok(present)
    }

    /// Deals with events; returns the sidecars that were started, or the failure that ended the stream.
    async fn take_batch(
        &self,
        events: Vec<Result<EventMessage, Error>>,
        tell: &UnboundedSender<RuntimeEvent>,
        later: &mut BTreeSet<SandboxId>,
    ) -> Result<Vec<Started>, Failure> {
        let mut batch = Batch::default();
        for event in events {
            let event = match event {
                Ok(event) => event,
                Err(error) => match Failure::from(error) {
                    // One event that makes no sense says nothing about the others.
                    Failure::Unreadable(what) => {
                        debug!(what, "an event is not understood");
                        continue;
                    }
                    failure => return Err(failure),
                },
            };
            batch.committed.extend(snapshot_of(&event));
            self.take(&event, tell, &mut batch, later);
        }
        join_all(batch.concerned.into_iter().map(|(id, parsed)| self.look_again(id, parsed, tell))).await;
        for snapshot in batch.committed {
            self.committed(snapshot).await;
        }
        Ok(batch.sidecars)
    }

    /// Finds out which box an event is a reason to look at: its own, or that of its sidecar.
    fn take(
        &self,
        event: &EventMessage,
        tell: &UnboundedSender<RuntimeEvent>,
        batch: &mut Batch,
        later: &mut BTreeSet<SandboxId>,
    ) {
        let Some((action, actor)) = event.action.as_deref().zip(event.actor.as_ref()) else { return };
        let Some(attributes) = &actor.attributes else { return };
        let said = |key: &str| attributes.get(key).map_or("", String::as_str);
        if !labels::are_genuine(attributes, said("name"), said("image")) {
            return;
        }
        let parsed = labels::parse(attributes);
        let sidecar = labels::sidecar_of(attributes).filter(|_| parsed.is_none());
        let Some(id) = parsed.as_ref().map(|parsed| parsed.id).or(sidecar) else { return };
        let turned = matches!(action, "pause" | "unpause") && sidecar.is_none();
        let changes =
            turned || matches!(action, "create" | "start" | "die" | "destroy" | "restart" | "rename");
        if turned && let Some(at) = at(event) {
            self.memory.turned(id, at);
        }
        if action == "oom" {
            let at = at(event).unwrap_or_else(|| SystemClock.now());
            let event =
                |kind: &str, message: &str| BoxEvent { at, kind: kind.into(), message: message.into() };
            let _ = tell.send(match sidecar {
                None => RuntimeEvent::Happened(
                    id,
                    event("out_of_memory", "a process used more memory than the limit"),
                ),
                Some(_) => {
                    let message = "the egress sidecar used more memory than its limit";
                    RuntimeEvent::Noticed(id, event("egress_out_of_memory", message))
                }
            });
        }
        if sidecar.is_some()
            && action == "start"
            && attributes.contains_key(enforcer::LABEL)
            && let Some(key) = &actor.id
        {
            let at = at(event).unwrap_or_else(|| SystemClock.now());
            batch.sidecars.push(Started { key: key.clone(), id, at });
        }
        if !changes || self.memory.is_removing(id) {
            return;
        }
        if self.making().contains(&id) {
            // Its maker tells of the start, and only of that.
            if !matches!(action, "create" | "start") {
                later.insert(id);
            }
            return;
        }
        let known = batch.concerned.entry(id).or_default();
        if parsed.is_some() {
            *known = parsed;
        }
    }

    async fn look_again(&self, id: SandboxId, parsed: Option<Parsed>, tell: &UnboundedSender<RuntimeEvent>) {
        match self.observe(id).await {
            Ok(Some(observed)) => {
                let lost = lost::is_lost(&observed);
                let _ = tell.send(RuntimeEvent::Observed(Box::new(observed)));
                if lost {
                    self.end_lost(id).await;
                }
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
