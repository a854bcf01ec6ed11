//! From containers to observations: one box, or all of them.
//!
//! Owns the choice of the container that is a sandbox, and a memory of earlier inspects that spares a full list most of its calls.
//! Invariant: one container that cannot be looked at never hides the others.

use std::{
    collections::{HashMap, HashSet},
    net::{IpAddr, Ipv4Addr},
    sync::{Mutex, MutexGuard, PoisonError},
};

use bollard::query_parameters::{InspectContainerOptions, ListContainersOptions};
use futures_util::{StreamExt, stream};
use sandglass_sandbox::{
    Clock, SandboxId, SnapshotId, SystemClock, Timestamp,
    ports::runtime::{Condition, Exit, ExitCause, Exposure, Observation, RuntimeError},
    spec::{Egress, Entrypoint, MutableFacts, NetworkPolicy, Spec},
};
use tracing::{debug, warn};

use super::{
    Shared,
    agent::AGENT_PORT,
    container::{Container, Status},
    errors::{Failure, failed},
    freeze::no_such_box,
    labels::{self, Parsed},
    lost,
    side_facts::Changed,
    start,
};

/// Boxes and snapshots that are remembered as gone.
const MOST_GONE: usize = 10_000;
/// Inspects in flight during a full list.
const PARALLEL: usize = 16;
const HTTP_PORT: u16 = 8080;
const EGRESS_PORT: u16 = 18080;
/// What the servers put into the environment for the agent, not the user for the box.
const OF_THE_SYSTEM: [&str; 5] =
    ["OPENSANDBOX_ID", "EXECD_ACCESS_TOKEN", "EXECD_INIT", "EXECD_ENVS", sandglass_sandbox::hooks::VARIABLE];

/// The name of a sandbox's container.
pub(super) fn container_name(id: SandboxId) -> String {
    format!("sandbox-{id}")
}

/// What was seen before and need not be asked again.
#[derive(Default)]
pub(super) struct Memory(Mutex<Remembered>);

#[derive(Default)]
struct Remembered {
    /// By the engine's own id.
    containers: HashMap<String, Container>,
    /// What the agents of ended boxes said about their hooks, which will not change.
    complaints: HashMap<SandboxId, Option<String>>,
    /// When a box was last frozen or thawed: the one change that the engine does not date.
    turned: HashMap<SandboxId, Timestamp>,
    /// How boxes ended that lost their network, which the engine tells less well once they have ended.
    lost: HashMap<SandboxId, Exit>,
    /// Boxes that this process is removing, with how many times at once.
    removing: HashMap<SandboxId, usize>,
    /// Snapshots that were removed, perhaps before they were whole.
    unwanted: HashSet<SnapshotId>,
    /// Boxes that are gone, with the number of the first look that could have seen that.
    gone: HashMap<SandboxId, u64>,
}

/// Marks a box as being removed for as long as it lives: its end is no news then.
pub(super) struct Removing<'a>(&'a Memory, SandboxId);

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        let mut remembered = self.0.lock();
        let others = remembered.removing.get_mut(&self.1).map_or(0, |times| {
            *times -= 1;
            *times
        });
        if others == 0 {
            remembered.removing.remove(&self.1);
        }
    }
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Remembered> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The box was frozen or thawed.
    pub(super) fn turned(&self, id: SandboxId, at: Timestamp) {
        self.lock().turned.insert(id, at);
    }

    /// The box is gone: what looks before that one see of it is not so any more.
    pub(super) fn forget(&self, id: SandboxId, revision: u64) {
        let mut remembered = self.lock();
        remembered.turned.remove(&id);
        remembered.complaints.remove(&id);
        remembered.lost.remove(&id);
        if remembered.gone.len() >= MOST_GONE {
            // No look takes as long as that many removals.
            remembered.gone.clear();
        }
        remembered.gone.insert(id, revision);
    }

    /// Whether the box went after the look of that number began.
    fn went_after(&self, id: SandboxId, revision: u64) -> bool {
        self.lock().gone.get(&id).is_some_and(|gone| revision < *gone)
    }

    /// The engine was away: what is remembered may be wrong.
    pub(super) fn forget_containers(&self) {
        self.lock().containers.clear();
    }

    /// The snapshot was removed.
    pub(super) fn unwanted(&self, snapshot: SnapshotId) {
        let mut remembered = self.lock();
        if remembered.unwanted.len() >= MOST_GONE {
            remembered.unwanted.clear();
        }
        remembered.unwanted.insert(snapshot);
    }

    /// The snapshot is to be there.
    pub(super) fn wanted(&self, snapshot: SnapshotId) {
        self.lock().unwanted.remove(&snapshot);
    }

    pub(super) fn is_unwanted(&self, snapshot: SnapshotId) -> bool {
        self.lock().unwanted.contains(&snapshot)
    }

    pub(super) fn removing(&self, id: SandboxId) -> Removing<'_> {
        *self.lock().removing.entry(id).or_default() += 1;
        Removing(self, id)
    }

    pub(super) fn is_removing(&self, id: SandboxId) -> bool {
        self.lock().removing.contains_key(&id)
    }

    /// The condition of a box that may have lost its network before: it stays as it was first told, until the box is started anew.
    fn settled(&self, id: SandboxId, condition: Condition, started_at: Option<Timestamp>) -> Condition {
        let mut remembered = self.lock();
        let Condition::Exited(exit) = condition else {
            remembered.lost.remove(&id);
            return condition;
        };
        let known = remembered.lost.get(&id).filter(|known| started_at.is_none_or(|at| at <= known.at));
        match known {
            Some(known) => Condition::Exited(known.clone()),
            None => {
                if exit.cause == ExitCause::EgressLost {
                    remembered.lost.insert(id, exit.clone());
                }
                Condition::Exited(exit)
            }
        }
    }

    fn turned_at(&self, id: SandboxId) -> Option<Timestamp> {
        self.lock().turned.get(&id).copied()
    }
}

impl Shared {
    pub(super) async fn inspect_container(&self, name: &str) -> Result<Option<Container>, Failure> {
        let asked = self.client.call(|docker| async move {
            docker.inspect_container(name, None::<InspectContainerOptions>).await
        });
        match asked.await {
            Ok(answer) => {
                let container = Container::inspected(answer);
                self.memory.lock().containers.insert(container.key.clone(), container.clone());
                Ok(Some(container))
            }
            Err(failure) if failure.is_absent() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Every container, stopped ones too, with that label (`key` or `key=value`) that it does not merely inherit.
    pub(super) async fn containers_with(&self, label: &str) -> Result<Vec<Container>, Failure> {
        let options = ListContainersOptions {
            all: true,
            filters: Some(HashMap::from([("label".to_owned(), vec![label.to_owned()])])),
            ..ListContainersOptions::default()
        };
        let asked = self.client.call(|docker| async move { docker.list_containers(Some(options)).await });
        let listed: Vec<_> = asked.await?.into_iter().map(Container::listed).collect();
        let mut genuine = Vec::with_capacity(listed.len());
        for container in listed {
            // A list shows the id also of an image whose name means another by now; only an inspect tells them apart.
            let inspected = match container.is_genuine() {
                true => None,
                false => self.looked_at(container.clone()).await?,
            };
            if inspected.as_ref().unwrap_or(&container).is_genuine() {
                genuine.push(container);
            }
        }
        Ok(genuine)
    }

    /// The container of a sandbox. A container of the right name without the label is somebody else's.
    pub(super) async fn find(&self, id: SandboxId) -> Result<Option<Container>, Failure> {
        let named = self.inspect_container(&container_name(id)).await?;
        if let Some(named) = named
            && labels::parse(&named.labels).is_some_and(|parsed| parsed.id == id)
        {
            return Ok(Some(named));
        }
        let labelled = self.containers_with(&format!("{}={id}", labels::ID)).await?;
        match labelled.first() {
            Some(first) => self.inspect_container(&first.key).await,
            None => Ok(None),
        }
    }

    pub(super) async fn observe(&self, id: SandboxId) -> Result<Option<Observation>, Failure> {
        // Taken before the look, so that a later look that answers sooner wins.
        let revision = self.next_revision();
        match self.find(id).await? {
            Some(container) => self.observe_container(&container, revision).await,
            None => Ok(None),
        }
    }

    pub(super) async fn update_facts(
        &self,
        id: SandboxId,
        facts: &MutableFacts,
    ) -> Result<Observation, RuntimeError> {
        let revision = self.next_revision();
        let found = self.find(id).await.map_err(|e| e.during("facts"))?;
        let container = found.ok_or_else(|| no_such_box(id))?;
        let created = labels::parse(&container.labels).ok_or_else(|| no_such_box(id))?;
        let created = self.assigned.over(created).facts;
        let (side_facts, now) = (self.side_facts.clone(), facts.clone());
        let written = tokio::task::spawn_blocking(move || side_facts.write(id, &created, &now)).await;
        written
            .map_err(std::io::Error::other)
            .flatten()
            .map_err(|e| failed("facts", format!("cannot write the sandbox's side files: {e}")))?;
        let observed = self.observe_container(&container, revision).await.map_err(|e| e.during("facts"))?;
        observed.ok_or_else(|| no_such_box(id))
    }

    /// The observation that follows from an inspected container; `None` when it is no sandbox.
    pub(super) async fn observe_container(
        &self,
        container: &Container,
        revision: u64,
    ) -> Result<Option<Observation>, Failure> {
        let Some(parsed) = labels::parse(&container.labels) else { return Ok(None) };
        let sidecar = match container.joined() {
            Some(sidecar) => self.inspect_container(sidecar).await?,
            None => None,
        };
        if self.memory.went_after(parsed.id, revision) {
            return Ok(None);
        }
        let changed = self.side_facts.read(parsed.id);
        let mut observed = self.assemble(parsed, container, sidecar.as_ref(), changed, revision);
        self.explain(&mut observed).await;
        Ok(Some(observed))
    }

    /// All boxes. Those that are just being made are left to their makers.
    pub(super) async fn observe_all(&self) -> Result<Vec<Observation>, RuntimeError> {
        let revision = self.next_revision();
        let listed = self.containers_with(labels::ID).await.map_err(|e| e.during("list"))?;
        let sidecars = self.sidecars_of(&listed).await?;
        self.keep_remembered(&listed, &sidecars);
        let chosen = choose(listed, &self.making());
        let looks = stream::iter(chosen)
            .map(|(parsed, listed)| async move { (parsed, self.looked_at(listed).await) });
        let looked: Vec<_> = looks.buffer_unordered(PARALLEL).collect().await;
        let mut changed = self.side_facts.read_all();
        let mut observed = Vec::with_capacity(looked.len());
        for (parsed, container) in looked {
            let Some(container) = container.map_err(|e| e.during("list"))? else { continue };
            if self.memory.went_after(parsed.id, revision) {
                continue;
            }
            let sidecar = container.joined().and_then(|key| sidecars.get(key));
            let changed = changed.remove(&parsed.id).unwrap_or_default();
            let mut seen = self.assemble(parsed, &container, sidecar, changed, revision);
            self.explain(&mut seen).await;
            observed.push(seen);
        }
        Ok(observed)
    }

    /// The sidecars of these boxes, by the engine's own ids. A list does not tell when they started and ended.
    async fn sidecars_of(&self, listed: &[Container]) -> Result<HashMap<String, Container>, RuntimeError> {
        if listed.iter().all(|c| c.joined().is_none()) {
            return Ok(HashMap::new());
        }
        let found = self.containers_with(labels::SIDECAR_FOR).await.map_err(|e| e.during("list"))?;
        let looks = stream::iter(found).map(|listed| self.looked_at(listed)).buffer_unordered(PARALLEL);
        let looked: Vec<_> = looks.collect().await;
        let mut sidecars = HashMap::with_capacity(looked.len());
        for container in looked {
            let container = container.map_err(|e| e.during("list"))?;
            sidecars.extend(container.map(|container| (container.key.clone(), container)));
        }
        Ok(sidecars)
    }

    fn keep_remembered(&self, listed: &[Container], sidecars: &HashMap<String, Container>) {
        let mut there: HashSet<&str> = listed.iter().map(|c| c.key.as_str()).collect();
        there.extend(sidecars.keys().map(String::as_str));
        self.memory.lock().containers.retain(|key, _| there.contains(key.as_str()));
    }

    /// The engine tells only the exit code of a box whose hook failed; its agent said more.
    async fn explain(&self, observed: &mut Observation) {
        let Condition::Exited(exit) = &mut observed.condition else { return };
        let asked = observed.spec.hooks.pre_start.is_some();
        if !asked || exit.cause != ExitCause::Exited || exit.code == Some(0) {
            return;
        }
        let known = self.memory.lock().complaints.get(&observed.id).cloned();
        let complaint = match known {
            Some(known) => known,
            None => {
                // Not remembered: the next look asks again.
                let Ok(words) = self.last_words(observed.id).await else { return };
                let said = start::agent_complaint(&words).filter(|said| start::is_of_hook(said));
                self.memory.lock().complaints.insert(observed.id, said.clone());
                said
            }
        };
        if let Some(said) = complaint {
            exit.cause = ExitCause::EntrypointFailed;
            exit.message = said;
        }
    }

    /// A listed container with what only an inspect tells. A failure is only returned when the engine itself is gone.
    async fn looked_at(&self, listed: Container) -> Result<Option<Container>, Failure> {
        let remembered = self.memory.lock().containers.get(&listed.key).filter(|c| c.is_as(&listed)).cloned();
        if let Some(mut container) = remembered {
            container.refresh(&listed);
            return Ok(Some(container));
        }
        match self.inspect_container(&listed.key).await {
            Ok(found) => Ok(found),
            Err(failure) if failure.is_unavailable() => Err(failure),
            Err(failure) => {
                warn!(container = listed.name, error = %failure, "a container cannot be inspected");
                Ok(Some(listed))
            }
        }
    }

    fn assemble(
        &self,
        parsed: Parsed,
        container: &Container,
        sidecar: Option<&Container>,
        changed: Changed,
        revision: u64,
    ) -> Observation {
        let place = Place {
            network: &self.config.network_mode,
            host: match self.config.engine.remote_host() {
                None => Some(Ipv4Addr::LOCALHOST.into()),
                Some(host) => host.parse().ok(),
            },
            sees_containers: self.config.engine.is_local(),
        };
        let (id, turned) = (parsed.id, self.memory.turned_at(parsed.id));
        let parsed = self.assigned.over(parsed);
        let mut observed = observation(parsed, container, sidecar, &place);
        observed.condition = self.memory.settled(id, observed.condition, container.started_at);
        if let Condition::Exited(exit) = &observed.condition {
            observed.since = exit.at;
        }
        if observed.condition != Condition::Paused {
            self.saves.seen_unfrozen(id, tokio::time::Instant::now());
        } else if self.saves.has(id) {
            observed.condition = Condition::Running;
        }
        self.known().insert(id);
        observed.facts = changed.over(&observed.facts);
        observed.revision = revision;
        if matches!(observed.condition, Condition::Running | Condition::Paused) {
            observed.since = turned.map_or(observed.since, |at| at.max(observed.since));
        }
        observed
    }
}

/// One container for every sandbox: the one of the right name, else the first that carries its id.
fn choose(
    listed: Vec<Container>,
    making: &std::collections::BTreeSet<SandboxId>,
) -> Vec<(Parsed, Container)> {
    let mut chosen: HashMap<SandboxId, (Parsed, Container)> = HashMap::new();
    for container in listed {
        let Some(parsed) = labels::parse(&container.labels) else {
            debug!(container = container.name, "a container whose sandbox id cannot be read is ignored");
            continue;
        };
        let id = parsed.id;
        if container.status == Status::Created && making.contains(&id) {
            continue;
        }
        if container.name == container_name(id) || !chosen.contains_key(&id) {
            chosen.insert(id, (parsed, container));
        }
    }
    chosen.into_values().collect()
}

/// Where this server stands towards the engine.
pub(super) struct Place<'a> {
    /// The network whose addresses are preferred.
    pub network: &'a str,
    /// The address of the engine's host.
    pub host: Option<IpAddr>,
    /// Whether addresses of containers lead anywhere from here.
    pub sees_containers: bool,
}

/// The facts as the containers tell them; what side files and this process's memory know is laid over them by the caller.
pub(super) fn observation(
    parsed: Parsed,
    container: &Container,
    sidecar: Option<&Container>,
    place: &Place<'_>,
) -> Observation {
    let created_at = match &parsed.record {
        Some(record) => record.created_at,
        None => container.created_at.unwrap_or(Timestamp::clamped(0)),
    };
    let condition = lost::lost(container, sidecar).map_or_else(|| condition(container), Condition::Exited);
    let since = match &condition {
        Condition::Exited(exit) => exit.at,
        Condition::Starting => created_at,
        Condition::Running | Condition::Paused => container.started_at.unwrap_or(created_at),
    };
    let joined = container.joined().is_some();
    let (address, exposure) = reach(&parsed, container, sidecar, place);
    let address = address.filter(|_| !matches!(condition, Condition::Exited(_)));
    let egress_token = parsed.egress_token.clone().filter(|_| joined);
    let env = |name: &str| container.env.iter().find(|(key, _)| key == name).map(|(_, v)| v.clone());
    let (id, facts) = (parsed.id, parsed.facts.clone());
    let (spec, entrypoint, agent_token, route_token) = match parsed.record {
        Some(record) => (record.spec, record.argv, record.agent_token, record.route_token),
        None => {
            let token = env("EXECD_ACCESS_TOKEN").unwrap_or_default();
            let spec = foreign_spec(parsed, container, joined);
            (spec, container.command.clone(), token, String::new())
        }
    };
    // A sandbox that was a warm box began with its assignment.
    let (started_at, since) = (container.started_at.map(|at| at.max(created_at)), since.max(created_at));
    Observation {
        id,
        revision: 0,
        spec,
        entrypoint,
        facts,
        condition,
        created_at,
        started_at,
        since,
        address,
        exposure,
        agent_token,
        route_token,
        egress_token,
    }
}

fn condition(container: &Container) -> Condition {
    match container.status {
        Status::Created => Condition::Starting,
        Status::Running => Condition::Running,
        Status::Paused => Condition::Paused,
        Status::Ended => Condition::Exited(exit(container)),
    }
}

fn exit(container: &Container) -> Exit {
    let code = container.exit_code;
    let failed = code != Some(0);
    let (cause, mut message) = match code {
        _ if failed && container.out_of_memory => {
            (ExitCause::OutOfMemory, "ended by the kernel: it used more memory than its limit".to_owned())
        }
        Some(code) => (ExitCause::Exited, format!("exited with code {code}")),
        None => (ExitCause::Exited, "exited with a code that the engine does not tell".to_owned()),
    };
    if !container.error.is_empty() {
        message = format!("{message}: {}", container.error);
    }
    let at = container.finished_at.or(container.started_at).or(container.created_at);
    Exit { code, signal: None, cause, message, at: at.unwrap_or_else(|| SystemClock.now()) }
}

/// Where the server and clients reach the ports of a box. A box behind a sidecar has the sidecar's address and ports.
fn reach(
    parsed: &Parsed,
    container: &Container,
    sidecar: Option<&Container>,
    place: &Place<'_>,
) -> (Option<IpAddr>, Exposure) {
    let lives = matches!(container.status, Status::Running | Status::Paused);
    if container.network_mode == "host" {
        return (place.host.filter(|_| lives), Exposure::Host);
    }
    let owner = match container.joined() {
        Some(_) => sidecar,
        None => Some(container),
    };
    let address =
        owner.filter(|_| lives && place.sees_containers).and_then(|owner| owner.address(place.network));
    let bound = |port: u16| owner.and_then(|o| o.published.get(&port)).map(|(_, outside)| *outside);
    let published = parsed.published.or_else(|| bound(AGENT_PORT).zip(bound(HTTP_PORT)));
    let egress = container.joined().and_then(|_| bound(EGRESS_PORT));
    let exposure = match published {
        Some((agent, http)) => Exposure::Published { agent, http, egress },
        None => Exposure::None,
    };
    (address, exposure)
}

/// What another server was asked for, as far as the container tells.
fn foreign_spec(parsed: Parsed, container: &Container, joined: bool) -> Spec {
    let entrypoint = match container.command.is_empty() {
        true => Entrypoint::Image,
        false => Entrypoint::Command(container.command.clone()),
    };
    let env = container.env.iter().filter(|(key, _)| !OF_THE_SYSTEM.contains(&key.as_str()));
    let policy = Egress { policy: NetworkPolicy::default(), credential_proxy: false, env: Vec::new() };
    Spec {
        env: env.cloned().collect(),
        limits: container.limits,
        platform: parsed.platform,
        extensions: parsed.extensions,
        snapshot: parsed.snapshot,
        tenant: parsed.tenant,
        egress: (joined && parsed.egress_token.is_some()).then_some(policy),
        ..Spec::new(container.image.clone(), entrypoint)
    }
}

#[cfg(test)]
#[path = "observe_tests.rs"]
mod tests;
