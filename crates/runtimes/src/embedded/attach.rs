//! Finding boxes by their directories and listening to their shims: the whole of what a restart needs.

use std::{io, path::Path, sync::Arc, time::Duration};

use futures_util::{StreamExt, stream};
use sandglass_sandbox::{
    SandboxId, Timestamp,
    ports::{
        RuntimeErrorKind,
        runtime::{RuntimeError, RuntimeEvent},
    },
};
use sandglass_shim::{
    protocol::{Notice, Request},
    spec::{BoxSpec, BoxState, ExitCause, ExitRecord, MutableFacts, Phase},
};
use tracing::{info, warn};

use super::{
    Shared,
    boxes::{Known, since},
    control::Channel,
    plan::About,
    records,
};

/// Shims asked at the same time during a full list.
const PARALLEL: usize = 16;
/// Pauses between attempts to listen to a shim that lives.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_secs(5);
/// How long after a server died a shim that it asked for may still appear.
const LATE_FORK: Duration = Duration::from_millis(150);

impl Shared {
    /// Brings the known boxes in line with the directories.
    pub(super) async fn scan(self: &Arc<Self>) -> Result<(), RuntimeError> {
        let failed = |e: io::Error| {
            RuntimeError::new(
                RuntimeErrorKind::Unavailable,
                "list",
                format!("cannot read the sandboxes directory: {e}"),
            )
        };
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.sandboxes).map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            // Other names are not ours to touch.
            if let Some(id) = name.to_str().and_then(|n| n.parse::<SandboxId>().ok()) {
                found.push(id);
            }
        }
        let unknown: Vec<SandboxId> = {
            let busy = self.busy();
            let known = self.boxes.lock();
            found.iter().filter(|id| !busy.contains_key(id) && !known.contains_key(id)).copied().collect()
        };
        stream::iter(unknown).for_each_concurrent(PARALLEL, |id| self.clone().attach(id)).await;
        let gone: Vec<SandboxId> = {
            let busy = self.busy();
            self.boxes
                .lock()
                .keys()
                .filter(|id| !found.contains(id) && !busy.contains_key(id))
                .copied()
                .collect()
        };
        for id in gone {
            if !self.dir(id).exists() {
                self.end_and_forget(id).await;
            }
        }
        Ok(())
    }

    /// Takes up a box whose directory was found.
    pub(super) async fn attach(self: Arc<Self>, id: SandboxId) {
        let dir = self.dir(id);
        let (spec, about) = match read_spec(&dir) {
            Ok(read) => read,
            Err(error) => {
                warn!(sandbox = %id, error = %error, "a half-made sandbox directory is removed");
                if let Err(error) = self.clear(id).await {
                    warn!(sandbox = %id, error = %error, "it could not be removed");
                }
                return;
            }
        };
        if let Some(network) = &spec.network {
            self.network.adopt(network.address);
        }
        let facts = records::read_facts(&dir).unwrap_or_default();
        if !self.listen(id, &dir, &spec, &about, &facts).await {
            let mut lives = shim_lives(&dir).await;
            if !lives && !began(&dir) {
                // A shim that the server before us asked for may only just have been forked.
                tokio::time::sleep(LATE_FORK).await;
                if self.listen(id, &dir, &spec, &about, &facts).await {
                    return;
                }
                lives = shim_lives(&dir).await;
                if !lives && !began(&dir) {
                    return self.discard(id).await;
                }
            }
            if !lives {
                self.bury(id, &dir).await;
            }
            let state = records::read_state(&dir).unwrap_or_else(|_| if lives { making() } else { lost() });
            let since = since(&state, &spec);
            let known = Known { spec: spec.into(), about: about.into(), facts, state, since, listener: None };
            self.boxes.lock().insert(id, known);
            if lives {
                self.follow(id, None);
            }
        }
    }

    /// A box that never ran is no box: what is wanted of it is in the open intent, which makes it again.
    async fn discard(&self, id: SandboxId) {
        info!(sandbox = %id, "a box that never ran is removed");
        let address = records::read_spec(&self.dir(id)).ok().and_then(|s| s.network).map(|n| n.address);
        match (self.clear(id).await, address) {
            (Ok(()), Some(address)) => self.network.give_back(address),
            (Ok(()), None) => {}
            (Err(error), _) => warn!(sandbox = %id, error = %error, "it could not be removed"),
        }
    }

    /// Subscribes to the shim; false when there is none.
    async fn listen(
        self: &Arc<Self>,
        id: SandboxId,
        dir: &Path,
        spec: &BoxSpec,
        about: &About,
        facts: &MutableFacts,
    ) -> bool {
        let Ok(mut channel) = Channel::to_shim(dir) else { return false };
        let state = match channel.request(&Request::Subscribe).await {
            Ok(answer) if answer.ok => answer.state,
            Ok(_) | Err(_) => return false,
        };
        let Some(state) = state else { return false };
        let since = since(&state, spec);
        let known = Known {
            spec: Arc::new(spec.clone()),
            about: Arc::new(about.clone()),
            facts: facts.clone(),
            state,
            since,
            listener: None,
        };
        self.boxes.lock().insert(id, known);
        self.follow(id, Some(channel));
        true
    }

    /// Starts the task that listens to the shim of a known box.
    pub(super) fn follow(self: &Arc<Self>, id: SandboxId, channel: Option<Channel>) {
        let shared = self.clone();
        let task = tokio::spawn(async move { shared.hear(id, channel).await });
        if let Some(known) = self.boxes.lock().get_mut(&id) {
            known.listener = Some(task.abort_handle());
        }
    }

    /// Listens until the box is gone or its shim is dead. A subscription that breaks while the shim lives is made again.
    async fn hear(self: Arc<Self>, id: SandboxId, mut channel: Option<Channel>) {
        let dir = self.dir(id);
        let mut pause = SHORTEST_PAUSE;
        loop {
            let subscribed = match channel.take() {
                Some(channel) => Some(channel),
                None => self.subscribe(id, &dir).await,
            };
            if let Some(mut channel) = subscribed {
                pause = SHORTEST_PAUSE;
                while let Ok(Some(notice)) = channel.receive::<Notice>().await {
                    self.boxes.happened(id, &notice.event);
                    let at = Timestamp::clamped(notice.event.at_ms);
                    if let Some(observed) = self.boxes.set_state(id, notice.state, Some(at)) {
                        self.boxes.tell(RuntimeEvent::Observed(Box::new(observed)));
                    }
                }
            }
            // The end of the stream: removed by us, removed by the shim itself, the shim was killed, or only the connection broke.
            if !self.boxes.lock().contains_key(&id) {
                return;
            }
            let busy = self.busy().contains_key(&id);
            if !busy && !dir.exists() {
                return self.end_and_forget(id).await;
            }
            if !busy && !shim_lives(&dir).await {
                self.bury(id, &dir).await;
                let state = records::read_state(&dir).unwrap_or_else(|_| lost());
                if let Some(observed) = self.boxes.set_state(id, state, None) {
                    self.boxes.tell(RuntimeEvent::Observed(Box::new(observed)));
                }
                return;
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    async fn subscribe(&self, id: SandboxId, dir: &Path) -> Option<Channel> {
        let mut channel = Channel::to_shim(dir).ok()?;
        let answer = channel.request(&Request::Subscribe).await.ok()?;
        if let Some(observed) = answer.state.and_then(|state| self.boxes.set_state(id, state, None)) {
            self.boxes.tell(RuntimeEvent::Observed(Box::new(observed)));
        }
        Some(channel)
    }

    /// Ends what a dead shim left behind; the records stay.
    async fn bury(&self, id: SandboxId, dir: &Path) {
        let path = dir.to_path_buf();
        match tokio::task::spawn_blocking(move || sandglass_shim::teardown(&path)).await {
            Ok(Ok(())) => info!(sandbox = %id, "the shim is gone; its leftovers were removed"),
            Ok(Err(error)) => warn!(sandbox = %id, error = %error, "leftovers of a dead shim remain"),
            Err(error) => warn!(sandbox = %id, error = %error, "the teardown did not finish"),
        }
    }

    /// Removes a box that nobody supervises, and its directory.
    pub(super) async fn clear(&self, id: SandboxId) -> Result<(), RuntimeError> {
        let dir = self.dir(id);
        let done = tokio::task::spawn_blocking(move || {
            match sandglass_shim::teardown(&dir) {
                // The records go in a moment; a full disk must not keep us from making room.
                Err(e) if e.source.kind() != io::ErrorKind::StorageFull => return Err(describe(&e)),
                _ => {}
            }
            match sandglass_shim::remove_dir(&dir) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    Err(format!("cannot remove its directory: {e}"))
                }
                _ => Ok(()),
            }
        });
        match done.await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(message)) => Err(RuntimeError::new(RuntimeErrorKind::Failed, "teardown", message)),
            Err(e) => Err(RuntimeError::new(RuntimeErrorKind::Failed, "teardown", e.to_string())),
        }
    }

    /// The directory is gone: nothing else of the box may stay, also when somebody removed the directory by hand.
    pub(super) async fn end_and_forget(&self, id: SandboxId) {
        if let Err(error) = self.end_without_directory(id).await {
            warn!(sandbox = %id, error = %error, "a box without a directory could not be ended; trying again later");
            return;
        }
        self.forget(id);
    }

    /// Ends shim, processes, cgroups and interface of a known box by their names alone. An unknown box is success.
    pub(super) async fn end_without_directory(&self, id: SandboxId) -> Result<(), RuntimeError> {
        let found = self.boxes.lock().get(&id).map(|known| {
            let interface = known.spec.network.as_ref().map(|n| n.host_interface.clone());
            (interface, known.state.shim_pid, known.state.shim_start_ticks)
        });
        let Some((interface, pid, ticks)) = found else { return Ok(()) };
        let ended = tokio::task::spawn_blocking(move || {
            sandglass_shim::end_by_id(&id.to_string(), interface.as_deref(), pid, ticks)
                .map_err(|e| describe(&e))
        });
        ended
            .await
            .unwrap_or_else(|e| Err(e.to_string()))
            .map_err(|message| RuntimeError::new(RuntimeErrorKind::Failed, "teardown", message))
    }

    /// The box and its directory are gone: its address may be used again.
    pub(super) fn forget(&self, id: SandboxId) {
        let known = self.boxes.lock().remove(&id);
        if let Some(network) = known.as_ref().and_then(|k| k.spec.network.as_ref()) {
            self.network.give_back(network.address);
        }
        if known.is_some() {
            self.boxes.tell(RuntimeEvent::Removed(id));
        }
    }
}

/// Whether the box in the directory has ever run.
fn began(dir: &Path) -> bool {
    records::read_state(dir).is_ok_and(|state| state.started_at_ms.is_some())
}

/// Whether a shim holds the directory. Unknown counts as alive: tearing down under a living shim would be worse than asking again.
pub(super) async fn shim_lives(dir: &Path) -> bool {
    let dir = dir.to_path_buf();
    tokio::task::spawn_blocking(move || sandglass_shim::shim_alive(&dir).unwrap_or(true))
        .await
        .unwrap_or(true)
}

pub(super) fn describe(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        let inner_text = inner.to_string();
        if !text.contains(&inner_text) {
            text = format!("{text}: {inner_text}");
        }
        cause = inner.source();
    }
    text
}

fn read_spec(dir: &Path) -> io::Result<(BoxSpec, About)> {
    let spec = records::read_spec(dir)?;
    let about = serde_json::from_value(spec.about.clone()).map_err(io::Error::other)?;
    Ok((spec, about))
}

/// What is known of a box whose shim lives but has not written anything yet.
fn making() -> BoxState {
    BoxState { phase: Phase::Creating, exit: None, ..lost() }
}

fn lost() -> BoxState {
    BoxState {
        phase: Phase::Exited,
        paused: false,
        init_pid: None,
        init_start_ticks: None,
        shim_pid: 0,
        shim_start_ticks: 0,
        boot_id: String::new(),
        started_at_ms: None,
        exit: Some(ExitRecord {
            code: None,
            signal: None,
            cause: ExitCause::ShimLost,
            message: "the shim was lost before it could record anything".into(),
            at_ms: 0,
        }),
        enforcer: None,
    }
}
