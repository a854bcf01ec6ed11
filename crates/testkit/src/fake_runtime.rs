//! The runtime port in memory, with delays and faults on command.

use std::{
    collections::{BTreeMap, HashMap, HashSet, VecDeque},
    net::Ipv4Addr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use async_trait::async_trait;
use futures_util::stream::{self, BoxStream};
use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    ports::{
        RuntimeErrorKind,
        runtime::{
            BoxEvent, Capabilities, Condition, Exit, ExitCause, Exposure, Observation, PrepareProgress,
            Runtime, RuntimeError, RuntimeEvent, StartPlan, Usage,
        },
    },
    spec::{Entrypoint, MutableFacts, Secrets, Spec},
};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// What is to go wrong with the next call of a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Nothing is done and an error is answered.
    Refuse,
    /// Nothing is done, since the runtime does not answer.
    Away,
    /// It is done, but the answer is an error: the ambiguous case.
    DoneButFailed,
    /// It takes this long, then succeeds.
    Slow(Duration),
}

#[derive(Default)]
struct World {
    boxes: HashMap<SandboxId, Observation>,
    faults: HashMap<&'static str, VecDeque<Fault>>,
    revision: u64,
    tell: Option<UnboundedSender<RuntimeEvent>>,
    starts: HashMap<SandboxId, u32>,
    snapshots: HashSet<SnapshotId>,
    /// What goes on being made for an engine that has ended.
    saving: HashSet<SnapshotId>,
    away: bool,
    /// References of images that no box can be made of.
    unusable: HashSet<String>,
    without_snapshots: bool,
    /// The port of the host that leads to agents, on a backend that sees nothing of this machine.
    remote_agents: Option<u16>,
    /// What references of images stand for, where they were moved.
    images: HashMap<String, String>,
}

/// See the module documentation. Boxes survive an engine, so a test can restart one on it.
#[derive(Default)]
pub struct FakeRuntime(Mutex<World>);

impl std::fmt::Debug for FakeRuntime {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FakeRuntime").field("boxes", &self.lock().boxes.len()).finish()
    }
}

impl FakeRuntime {
    /// Queues a fault for the next call of `method`.
    pub fn inject(&self, method: &'static str, fault: Fault) {
        self.lock().faults.entry(method).or_default().push_back(fault);
    }

    /// From now on no box can be made of the image.
    pub fn cannot_use(&self, image: &str) {
        self.lock().unusable.insert(image.to_owned());
    }

    /// Boxes that exist.
    pub fn boxes(&self) -> Vec<SandboxId> {
        self.lock().boxes.keys().copied().collect()
    }

    /// How often a box of this id was made.
    pub fn starts(&self, id: SandboxId) -> u32 {
        self.lock().starts.get(&id).copied().unwrap_or(0)
    }

    /// The box ends by itself.
    pub fn exits(&self, id: SandboxId, code: i32, at: Timestamp) {
        let exit = Exit {
            code: Some(code),
            signal: None,
            cause: ExitCause::Exited,
            message: format!("exited with code {code}"),
            at,
        };
        let _ = self.change(id, |o| {
            o.condition = Condition::Exited(exit);
            o.since = at;
        });
    }

    /// The box disappears without a word, as after a reboot.
    pub fn vanishes(&self, id: SandboxId) {
        self.lock().boxes.remove(&id);
    }

    /// Snapshots whose artifacts exist.
    pub fn artifacts(&self) -> Vec<SnapshotId> {
        self.lock().snapshots.iter().copied().collect()
    }

    /// The backend cannot be reached: every call fails, boxes stay as they are.
    pub fn goes_away(&self) {
        self.lock().away = true;
        self.tell(RuntimeEvent::Lost(unreachable()));
    }

    /// It answers again, and tells what there is.
    pub fn comes_back(&self) {
        let boxes: Vec<_> = {
            let mut world = self.lock();
            world.away = false;
            world.boxes.values().cloned().collect()
        };
        for observed in boxes {
            self.tell(RuntimeEvent::Observed(Box::new(observed)));
        }
        self.tell(RuntimeEvent::Back);
    }

    /// The reference of an image stands for something else from now on.
    pub fn moves_image(&self, reference: &str, identity: &str) {
        self.lock().images.insert(reference.to_owned(), identity.to_owned());
    }

    /// Boxes that wait for a sandbox.
    pub fn waiting(&self) -> Vec<SandboxId> {
        let world = self.lock();
        world.boxes.values().filter(|o| o.spec.standby.is_some()).map(|o| o.id).collect()
    }

    /// The backend makes no snapshots.
    pub fn lacks_snapshots(&self) {
        self.lock().without_snapshots = true;
    }

    /// The backend sees no files of this machine: boxes have no address and no sockets of the server, and a port of the host leads to their
    /// agents.
    pub fn is_remote(&self, agents: u16) {
        self.lock().remote_agents = Some(agents);
    }

    /// A box that an attempt left behind which died before it was ready.
    pub fn half_made(&self, id: SandboxId, at: Timestamp) {
        let spec = Spec::new("img", Entrypoint::AgentOnly);
        let observed = Observation {
            id,
            revision: 0,
            spec,
            entrypoint: Vec::new(),
            facts: MutableFacts::default(),
            condition: Condition::Starting,
            created_at: at,
            started_at: None,
            since: at,
            address: None,
            exposure: Exposure::None,
            agent_token: String::new(),
            route_token: String::new(),
            egress_token: None,
        };
        self.lock().boxes.insert(id, observed);
        let _ = self.change(id, |_| {});
    }

    /// The box is frozen or thawed by somebody else.
    pub fn is_frozen(&self, id: SandboxId, frozen: bool) {
        let _ = self.change(id, |o| {
            o.condition = if frozen { Condition::Paused } else { Condition::Running };
        });
    }

    /// An engine that has ended asked for the artifact, which is still to come.
    pub fn goes_on_saving(&self, snapshot: SnapshotId) {
        self.lock().saving.insert(snapshot);
    }

    /// The artifact that was to come is there.
    pub fn has_saved(&self, snapshot: SnapshotId) {
        let mut world = self.lock();
        world.saving.remove(&snapshot);
        world.snapshots.insert(snapshot);
    }

    /// Something outside concerns the box.
    pub fn notices(&self, id: SandboxId, event: BoxEvent) {
        self.tell(RuntimeEvent::Noticed(id, event));
    }

    /// Tells the watcher that the backend cannot be reached, or that it is back.
    pub fn tell(&self, event: RuntimeEvent) {
        if let Some(tell) = &self.lock().tell {
            let _ = tell.send(event);
        }
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reach(&self) -> Result<(), RuntimeError> {
        if self.lock().away { Err(unreachable()) } else { Ok(()) }
    }

    async fn fault(&self, method: &'static str) -> Result<Option<Fault>, RuntimeError> {
        self.reach()?;
        let fault = self.lock().faults.get_mut(method).and_then(VecDeque::pop_front);
        if let Some(Fault::Slow(time)) = fault {
            tokio::time::sleep(time).await;
            self.reach()?;
            return Ok(None);
        }
        if fault == Some(Fault::Away) {
            return Err(unreachable());
        }
        Ok(fault)
    }

    fn change(
        &self,
        id: SandboxId,
        change: impl FnOnce(&mut Observation),
    ) -> Result<Observation, RuntimeError> {
        let mut world = self.lock();
        world.revision += 1;
        let revision = world.revision;
        let Some(observed) = world.boxes.get_mut(&id) else {
            return Err(RuntimeError::new(RuntimeErrorKind::NotFound, "find", "no such box"));
        };
        change(observed);
        observed.revision = revision;
        let observed = observed.clone();
        if let Some(tell) = &world.tell {
            let _ = tell.send(RuntimeEvent::Observed(Box::new(observed.clone())));
        }
        Ok(observed)
    }

    async fn perform(
        &self,
        method: &'static str,
        id: SandboxId,
        change: impl FnOnce(&mut Observation) + Send,
    ) -> Result<Observation, RuntimeError> {
        match self.fault(method).await? {
            Some(Fault::Refuse) => Err(injected(method)),
            Some(Fault::DoneButFailed) => {
                self.change(id, change)?;
                Err(injected(method))
            }
            _ => self.change(id, change),
        }
    }
}

fn unreachable() -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Unavailable, "engine", "it is away (injected)")
}

fn injected(method: &str) -> RuntimeError {
    RuntimeError::new(RuntimeErrorKind::Failed, method, "injected")
}

#[async_trait]
impl Runtime for FakeRuntime {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> Capabilities {
        let world = self.lock();
        Capabilities {
            pause: true,
            snapshot: !world.without_snapshots,
            gpu: true,
            network_policy: true,
            named_volumes: true,
            object_store_volumes: true,
            foreign_platforms: true,
            sockets: world.remote_agents.is_none(),
            standby: true,
        }
    }

    async fn admit(&self, _spec: &Spec) -> Result<(), RuntimeError> {
        match self.fault("admit").await? {
            Some(_) => Err(injected("admit")),
            None => Ok(()),
        }
    }

    async fn prepare(
        &self,
        _spec: &Spec,
        _secrets: &Secrets,
        progress: &(dyn Fn(PrepareProgress) + Send + Sync),
    ) -> Result<(), RuntimeError> {
        progress(PrepareProgress { phase: "pull", message: "nothing to pull".into() });
        match self.fault("prepare").await? {
            Some(_) => Err(RuntimeError::new(RuntimeErrorKind::ImagePull, "image", "injected")),
            None => Ok(()),
        }
    }

    async fn start(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        _secrets: &Secrets,
    ) -> Result<Observation, RuntimeError> {
        let fault = self.fault("start").await?;
        if fault == Some(Fault::Refuse) {
            return Err(injected("start"));
        }
        if self.lock().unusable.contains(&plan.spec.image) {
            return Err(RuntimeError::new(RuntimeErrorKind::Failed, "rootfs", "the image cannot be mounted"));
        }
        {
            let mut world = self.lock();
            let remote = world.remote_agents;
            if !world.boxes.contains_key(&id) {
                *world.starts.entry(id).or_default() += 1;
                let entrypoint = match &plan.spec.entrypoint {
                    Entrypoint::Command(argv) => argv.clone(),
                    _ => Vec::new(),
                };
                let observed = Observation {
                    id,
                    revision: 0,
                    spec: plan.spec.clone(),
                    entrypoint,
                    facts: plan.facts.clone(),
                    condition: Condition::Running,
                    created_at: plan.created_at,
                    started_at: Some(plan.created_at),
                    since: plan.created_at,
                    address: remote.is_none().then_some(Ipv4Addr::LOCALHOST.into()),
                    exposure: match remote {
                        Some(agent) => Exposure::Published { agent, http: agent, egress: None },
                        None => Exposure::Address,
                    },
                    agent_token: plan.agent_token.clone(),
                    route_token: plan.route_token.clone(),
                    egress_token: None,
                };
                world.boxes.insert(id, observed);
            }
        }
        if fault == Some(Fault::DoneButFailed) {
            // A runtime that answers an error leaves nothing, by contract.
            self.lock().boxes.remove(&id);
            return Err(injected("start"));
        }
        self.change(id, |_| {})
    }

    async fn assign(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError> {
        self.perform("assign", id, |o| {
            if o.spec.standby.is_none() {
                return;
            }
            if let Entrypoint::Command(argv) = &plan.spec.entrypoint {
                o.entrypoint.clone_from(argv);
            }
            o.spec = plan.spec.clone();
            o.facts = plan.facts.clone();
            o.created_at = plan.created_at;
            o.agent_token.clone_from(&plan.agent_token);
            o.route_token.clone_from(&plan.route_token);
        })
        .await
    }

    async fn image_identity(&self, image: &str) -> Result<String, RuntimeError> {
        self.reach()?;
        Ok(self.lock().images.get(image).cloned().unwrap_or_else(|| image.to_owned()))
    }

    async fn pause(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.perform("pause", id, |o| {
            if o.condition == Condition::Running {
                o.condition = Condition::Paused;
            }
        })
        .await
    }

    async fn resume(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.perform("resume", id, |o| {
            if o.condition == Condition::Paused {
                o.condition = Condition::Running;
            }
        })
        .await
    }

    async fn remove(&self, id: SandboxId, _grace: Duration) -> Result<(), RuntimeError> {
        match self.fault("remove").await? {
            Some(Fault::Refuse) => return Err(injected("remove")),
            Some(_) => {
                self.lock().boxes.remove(&id);
                return Err(injected("remove"));
            }
            None => {}
        }
        let mut world = self.lock();
        if world.boxes.remove(&id).is_some()
            && let Some(tell) = &world.tell
        {
            let _ = tell.send(RuntimeEvent::Removed(id));
        }
        Ok(())
    }

    async fn update_facts(&self, id: SandboxId, facts: &MutableFacts) -> Result<Observation, RuntimeError> {
        self.perform("update_facts", id, |o| o.facts = facts.clone()).await
    }

    async fn inspect(&self, id: SandboxId) -> Result<Option<Observation>, RuntimeError> {
        self.reach()?;
        Ok(self.lock().boxes.get(&id).cloned())
    }

    async fn list(&self) -> Result<Vec<Observation>, RuntimeError> {
        if self.fault("list").await?.is_some() {
            return Err(injected("list"));
        }
        Ok(self.lock().boxes.values().cloned().collect())
    }

    fn watch(&self) -> BoxStream<'static, RuntimeEvent> {
        let (tell, told) = unbounded_channel();
        self.lock().tell = Some(tell);
        Box::pin(stream::unfold(told, |mut told| async move { told.recv().await.map(|event| (event, told)) }))
    }

    async fn logs(&self, _id: SandboxId, _lines: usize) -> Result<Vec<String>, RuntimeError> {
        Ok(Vec::new())
    }

    async fn events(&self, _id: SandboxId) -> Result<Vec<BoxEvent>, RuntimeError> {
        Ok(Vec::new())
    }

    async fn usage(&self, _id: SandboxId) -> Result<Usage, RuntimeError> {
        Ok(Usage::default())
    }

    async fn describe(&self, _id: SandboxId) -> Result<BTreeMap<String, String>, RuntimeError> {
        Ok(BTreeMap::new())
    }

    fn snapshot_image(&self, snapshot: SnapshotId) -> String {
        format!("snapshot:{snapshot}")
    }

    async fn snapshot(&self, id: SandboxId, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        let fault = self.fault("snapshot").await?;
        if fault == Some(Fault::Refuse) {
            return Err(injected("snapshot"));
        }
        let mut world = self.lock();
        if !world.boxes.contains_key(&id) && !world.snapshots.contains(&snapshot) {
            return Err(RuntimeError::new(RuntimeErrorKind::NotFound, "find", "no such box"));
        }
        world.snapshots.insert(snapshot);
        if fault.is_some() { Err(injected("snapshot")) } else { Ok(()) }
    }

    async fn has_snapshot(&self, snapshot: SnapshotId) -> Result<bool, RuntimeError> {
        if self.fault("has_snapshot").await?.is_some() {
            return Err(injected("has_snapshot"));
        }
        Ok(self.lock().snapshots.contains(&snapshot))
    }

    async fn still_saves(&self, snapshot: SnapshotId) -> bool {
        self.lock().saving.contains(&snapshot)
    }

    async fn remove_snapshot(&self, snapshot: SnapshotId) -> Result<(), RuntimeError> {
        let fault = self.fault("remove_snapshot").await?;
        if fault == Some(Fault::Refuse) {
            return Err(injected("remove_snapshot"));
        }
        let image = self.snapshot_image(snapshot);
        let mut world = self.lock();
        if world.boxes.values().any(|o| o.spec.image == image) {
            return Err(RuntimeError::new(RuntimeErrorKind::InUse, "snapshot", "a sandbox is made from it"));
        }
        world.snapshots.remove(&snapshot);
        if fault.is_some() { Err(injected("remove_snapshot")) } else { Ok(()) }
    }
}
