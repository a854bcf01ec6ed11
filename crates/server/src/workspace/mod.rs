//! Sandboxes that are made from repositories, as far as they are more than a box: the image that is found for them, the channel to
//! their agents, and what the agents tell.
//!
//! Owns the listeners of the channel with the registry behind them, the secrets of creates, the files that a box is handed, and the facts
//! about agents that the engine merges into what it shows. Does not own intents or boxes (the [engine](crate::engine) does), nor how
//! images come about ([`Images`]).
//!
//! ```text
//!   engine ── Provisioner ──► Workspaces ──► Images (builds)
//!     ▲                          │  ▲
//!     └──── agent_told ──────────┘  └── channel (one socket a sandbox) ◄── agent
//! ```
//!
//! Invariants: what an agent was told is stored is stored; no secret is in the store, in history or in logs; an agent is heard over the
//! socket of its own sandbox alone; whether it is alive is judged by this server's clock, and the runtime is asked before it is given up.

mod ahead;
mod answer;
mod authority;
mod blame;
mod calls;
mod channel;
mod commands;
mod confidential;
mod desk;
mod document;
mod folders;
mod from_builds;
mod heard;
mod images;
mod notices;
mod output;
mod provisioner;
mod pull;
mod room;
pub(crate) mod secrets;
mod services;
mod sources;
mod told;

use std::{
    collections::HashMap,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak},
    time::Duration,
};

use sandglass_bridge::{
    Monotonic,
    server::{Notice, Registry},
};
use sandglass_sandbox::{
    Clock, SandboxId,
    ports::{Store, StoreError},
};
use tokio::sync::{Notify, mpsc};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tracing::{info, warn};

use crate::engine::Engine;

pub use authority::{NotCertified, UserCertificate};
pub use commands::NotCommanded;
pub use confidential::Confidential;
pub use from_builds::FromBuilds;
pub use images::{Images, Wanted};
pub use output::Output;
pub(crate) use secrets::SecretFiles;
pub(crate) use services::BRIDGE;
pub use services::{AgentView, HostKey, ServiceView};

use desk::{Desk, Kept};
use folders::Folders;

/// What is set once for all sandboxes.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where sockets, documents and secrets lie; of this server alone.
    pub state_dir: PathBuf,
    /// How long an agent may take to attach, from when its box was made.
    pub attach_within: Duration,
    /// From unresponsive to given up.
    pub grace: Duration,
    /// What an agent gets to end what it runs, before its box is removed.
    pub shutdown_grace: Duration,
    /// What git may do inside.
    pub git: sandglass_sandbox::workspace::Git,
    /// The file of this machine that `git.authorities` is in the box.
    pub git_authorities: Option<PathBuf>,
    /// Where agents without the socket reach this server, `http://host:port`.
    pub agent_url: Option<String>,
    /// The operator's secrets, which pools name.
    pub secrets_dir: Option<PathBuf>,
}

impl Settings {
    /// The usual numbers.
    pub fn new(state_dir: PathBuf) -> Self {
        Self {
            state_dir,
            attach_within: Duration::from_secs(60),
            grace: Duration::from_secs(45),
            shutdown_grace: Duration::from_secs(10),
            git: sandglass_sandbox::workspace::Git::default(),
            git_authorities: None,
            agent_url: None,
            secrets_dir: None,
        }
    }
}

/// See the module documentation. Shared as `Arc<Workspaces>`.
pub struct Workspaces {
    settings: Settings,
    folders: Folders,
    store: Arc<dyn Store>,
    clock: Arc<dyn Clock>,
    images: Arc<dyn Images>,
    engine: OnceLock<Weak<Engine>>,
    this: Weak<Workspaces>,
    monotonic: Monotonic,
    registry: Mutex<Registry>,
    desks: Mutex<HashMap<SandboxId, Arc<Desk>>>,
    /// What is held for boxes that wait in pools, and until their end for sandboxes that they became.
    ahead: Mutex<HashMap<SandboxId, ahead::Held>>,
    commands: commands::Waiting,
    notices: mpsc::UnboundedSender<Notice>,
    /// The earliest deadline may have become earlier.
    sooner: Notify,
    tasks: TaskTracker,
    stopping: CancellationToken,
}

impl std::fmt::Debug for Workspaces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Workspaces").field("desks", &self.desks().len()).finish_non_exhaustive()
    }
}

impl Workspaces {
    /// Takes up what earlier servers left: the agents that are known attach again over the same sockets. To be given to the engine with
    /// [`Engine::provision_with`] before that recovers, and [settled](Workspaces::settle) afterwards.
    ///
    /// # Errors
    /// When the store cannot be read.
    pub async fn open(
        settings: Settings,
        store: Arc<dyn Store>,
        clock: Arc<dyn Clock>,
        images: Arc<dyn Images>,
    ) -> Result<Arc<Self>, StoreError> {
        let monotonic = Monotonic::start();
        let (notices, told) = mpsc::unbounded_channel();
        let mut saved = Vec::new();
        let mut desks = HashMap::new();
        for record in store.agents().await? {
            let kept = Kept::read(&record)?;
            saved.extend(kept.registry.clone());
            desks.insert(record.sandbox_id, Arc::new(Desk::of(record.sandbox_id, kept)));
        }
        let registry = Registry::restored(incarnation(), saved, monotonic.now());
        let workspaces = Arc::new_cyclic(|this| Self {
            this: this.clone(),
            folders: Folders::new(&settings.state_dir),
            settings,
            store,
            clock,
            images,
            engine: OnceLock::new(),
            monotonic,
            registry: Mutex::new(registry),
            desks: Mutex::new(desks),
            ahead: Mutex::default(),
            commands: commands::Waiting::default(),
            notices,
            sooner: Notify::new(),
            tasks: TaskTracker::new(),
            stopping: CancellationToken::new(),
        });
        for desk in workspaces.all_desks() {
            workspaces.restore(&desk);
        }
        notices::spawn(&workspaces, told);
        Ok(workspaces)
    }

    fn restore(self: &Arc<Self>, desk: &Arc<Desk>) {
        match self.folders.confidential(desk.id) {
            Ok(secrets) => desk.open_to(&self.images, &secrets),
            Err(error) => warn!(sandbox = %desk.id, %error, "the secrets of a sandbox cannot be read"),
        }
        if let Err(error) = channel::open(self, desk) {
            warn!(sandbox = %desk.id, %error, "the socket of a sandbox cannot be opened again");
        }
    }

    /// Registers the engine that is told what agents tell. The first call counts.
    pub fn serve(&self, engine: &Arc<Engine>) {
        let _ = self.engine.set(Arc::downgrade(engine));
    }

    /// Once the engine knows what exists: of sandboxes that are gone it is told how they ended, nothing else is kept of them, and leases
    /// run for boxes that run. While the runtime is away that is not known; it is done when it is back.
    pub async fn settle(self: &Arc<Self>) {
        let Some(engine) = self.engine() else { return };
        // What comes later is no earlier server's.
        let mut left: Vec<_> = self.all_desks().iter().map(|desk| desk.id).collect();
        left.extend(self.folders.all());
        left.sort_unstable();
        left.dedup();
        if engine.reachable().is_ok() {
            return self.settle_with(&engine, left).await;
        }
        let this = self.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                () = engine.found() => this.settle_with(&engine, left).await,
                () = this.stopping.cancelled() => {}
            }
        });
    }

    async fn settle_with(self: &Arc<Self>, engine: &Arc<Engine>, mut gone: Vec<SandboxId>) {
        let sandbox = |id: SandboxId| engine.index().get(id).is_some();
        // Boxes that wait in pools are no sandboxes, and keep their files and images all the same.
        let present = |id: SandboxId| sandbox(id) || engine.waits(id);
        gone.retain(|id| !present(*id));
        for id in gone {
            if let Err(error) = engine.ended_unseen(id).await {
                warn!(sandbox = %id, %error, "how a sandbox ended cannot be recorded; the next start tries again");
                continue;
            }
            info!(sandbox = %id, "what is left of a sandbox that is gone is removed");
            if let Err(error) = crate::engine::provision::Provisioner::forget(self.as_ref(), id).await {
                warn!(sandbox = %id, %error, "it could not be removed");
            }
        }
        for id in self.folders.all().into_iter().filter(|id| !sandbox(*id)) {
            // Of a create that was never written down.
            if let Err(error) = self.folders.forget_confidential(id) {
                warn!(sandbox = %id, %error, "secrets of a create that came to nothing stay");
            }
        }
        for desk in self.all_desks() {
            if let Some(observed) = engine.index().get(desk.id).and_then(|entry| entry.observed) {
                crate::engine::provision::Provisioner::condition(self.as_ref(), desk.id, &observed.condition);
                self.ask(desk.id);
                // An earlier server may have ended between the box and this.
                crate::engine::provision::Provisioner::settled(self.as_ref(), desk.id);
            }
        }
        self.images.release_absent(&present).await;
    }

    /// Listens for agents that cannot use the socket of their sandbox. Returns where.
    ///
    /// # Errors
    /// When the listener cannot be used.
    pub fn listen(self: &Arc<Self>, listener: std::net::TcpListener) -> std::io::Result<SocketAddr> {
        channel::listen(self, listener)
    }

    /// Where images come from, and what a repository may be.
    pub fn images(&self) -> &dyn Images {
        self.images.as_ref()
    }

    /// Ends the listeners and tasks. Agents keep what they have to tell for the next server.
    pub async fn stop(&self) {
        self.stopping.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }

    /// Itself, for tasks that outlive a call.
    fn this(&self) -> Option<Arc<Self>> {
        self.this.upgrade()
    }

    fn engine(&self) -> Option<Arc<Engine>> {
        self.engine.get()?.upgrade()
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Acts on the registry, and passes on what it noticed.
    fn with_registry<T>(&self, act: impl FnOnce(&mut Registry, sandglass_bridge::Moment) -> T) -> T {
        let mut registry = self.registry();
        let done = act(&mut registry, self.monotonic.now());
        for notice in registry.take_notices() {
            // Nobody listens only when this ends.
            let _ = self.notices.send(notice);
        }
        done
    }

    fn desks(&self) -> MutexGuard<'_, HashMap<SandboxId, Arc<Desk>>> {
        self.desks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_desks(&self) -> Vec<Arc<Desk>> {
        self.desks().values().cloned().collect()
    }

    fn desk(&self, id: SandboxId) -> Option<Arc<Desk>> {
        self.desks().get(&id).cloned()
    }

    /// The desk of a sandbox, a new one if there was none.
    fn desk_for(&self, id: SandboxId) -> Arc<Desk> {
        let now = self.clock.now();
        self.desks().entry(id).or_insert_with(|| Arc::new(Desk::of(id, Kept::fresh(now)))).clone()
    }
}

/// A number that no other life of a server has.
fn incarnation() -> u64 {
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    high ^ low
}
