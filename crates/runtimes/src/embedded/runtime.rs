//! The `Runtime` port, one verb a method.

use std::{collections::BTreeMap, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::stream::BoxStream;
use sandglass_images::{Image, ImageError, ImageErrorKind};
use sandglass_sandbox::{
    SandboxId, SnapshotId, Timestamp,
    ports::{
        RuntimeErrorKind,
        runtime::{
            BoxEvent, Capabilities, Observation, PrepareProgress, Runtime, RuntimeError, RuntimeEvent,
            StartPlan, Usage,
        },
    },
    spec::{MutableFacts, Secrets, Spec, VolumeSource},
};
use sandglass_shim::{
    protocol::{CreateReport, Request, Response},
    spec::{BoxSpec, BoxState, Phase},
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tracing::{debug, info, warn};

use super::{
    EmbeddedRuntime, Shared,
    attach::{describe, shim_lives},
    boxes::{Known, history, since},
    control::{Channel, ask},
    plan::{About, facts_for_shim},
    records,
};
use crate::host_paths::private_dir;

/// Longest wait for a shim to report on a create.
const CREATE_PATIENCE: Duration = Duration::from_secs(60);
/// Attempts to connect to a new box, and how long each may take: about four seconds in all.
const REACH_ATTEMPTS: u32 = 200;
const REACH_ATTEMPT: Duration = Duration::from_millis(20);
/// After this many attempts in vain it is asked whether the box still runs.
const LOOK_EVERY: u32 = 4;
/// How long a box that is being started may take until its shim can be asked to end it, and how often it is tried.
const STARTING: Duration = Duration::from_secs(20);
const ASK_AGAIN: Duration = Duration::from_millis(10);
/// The name of the image made from the host's own files.
const HOST_IMAGE: &str = "host";

fn error(kind: RuntimeErrorKind, phase: &str, message: impl Into<String>) -> RuntimeError {
    RuntimeError::new(kind, phase, message)
}

fn no_such_box(id: SandboxId) -> RuntimeError {
    error(RuntimeErrorKind::NotFound, "find", format!("no box {id}"))
}

fn of_image(e: &ImageError) -> RuntimeError {
    let kind = match e.kind() {
        ImageErrorKind::InvalidReference => RuntimeErrorKind::Invalid,
        ImageErrorKind::NoSpace | ImageErrorKind::TooLarge => RuntimeErrorKind::Exhausted,
        ImageErrorKind::NotFound
        | ImageErrorKind::Unauthorized
        | ImageErrorKind::Unreachable
        | ImageErrorKind::Corrupt
        | ImageErrorKind::Unsupported
        | ImageErrorKind::InUse
        | ImageErrorKind::Io => RuntimeErrorKind::ImagePull,
    };
    error(kind, "image", describe(e))
}

fn of_io(phase: &str, what: &str, e: &io::Error) -> RuntimeError {
    let kind = match e.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT | libc::EMFILE | libc::ENFILE) => RuntimeErrorKind::Exhausted,
        _ => RuntimeErrorKind::Failed,
    };
    error(kind, phase, format!("cannot {what}: {e}"))
}

/// Marks an id as being worked on for as long as it lives; several may at a time.
struct Busy<'a>(&'a Shared, SandboxId);

impl<'a> Busy<'a> {
    fn mark(shared: &'a Shared, id: SandboxId) -> Self {
        *shared.busy().entry(id).or_default() += 1;
        Self(shared, id)
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        let mut busy = self.0.busy();
        if let Some(count) = busy.get_mut(&self.1) {
            *count -= 1;
            if *count == 0 {
                busy.remove(&self.1);
            }
        }
    }
}

/// Has the shim of a directory end its box. Success where no shim can be asked, or it died on the way: what it has not done is the caller's.
async fn end_by_shim(dir: &Path, grace: Duration) -> Result<(), RuntimeError> {
    let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
    match ask(dir, &Request::Remove { grace_ms }).await {
        Ok(answer) if answer.ok => Ok(()),
        Ok(answer) => {
            let message = answer.message.unwrap_or_else(|| "refused without a reason".into());
            Err(error(RuntimeErrorKind::Failed, "teardown", message))
        }
        Err(e) if e.kind() == io::ErrorKind::TimedOut => {
            Err(error(RuntimeErrorKind::Failed, "teardown", "the shim did not finish in time"))
        }
        Err(_) => Ok(()),
    }
}

impl Shared {
    pub(super) async fn find_image(self: &Arc<Self>, reference: &str) -> Result<Option<Image>, RuntimeError> {
        if reference == HOST_IMAGE {
            if !self.config.host_image {
                let message = "the `host` image is offered only by servers that listen on a loopback address; see [embedded] host_image";
                return Err(error(RuntimeErrorKind::Invalid, "image", message));
            }
            if let Some(image) = self.found.host() {
                return Ok(Some(image));
            }
            let shared = self.clone();
            let made = tokio::task::spawn_blocking(move || shared.found.make_host(&shared.images)).await;
            return match made {
                Ok(image) => image.map(Some).map_err(|e| of_image(&e)),
                Err(e) => Err(error(RuntimeErrorKind::Failed, "image", e.to_string())),
            };
        }
        let (images, wanted) = (self.images.clone(), reference.to_owned());
        match tokio::task::spawn_blocking(move || images.resolve(&wanted)).await {
            Ok(found) => {
                let found = found.map_err(|e| of_image(&e))?;
                if let Some(image) = &found {
                    self.found.prepared(reference, image);
                }
                Ok(found)
            }
            Err(e) => Err(error(RuntimeErrorKind::Failed, "image", e.to_string())),
        }
    }

    async fn make(self: &Arc<Self>, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError> {
        let found = match self.found.just_prepared(&plan.spec.image) {
            Some(image) => Some(image),
            None => self.find_image(&plan.spec.image).await?,
        };
        let image = found.ok_or_else(|| {
            error(
                RuntimeErrorKind::ImagePull,
                "image",
                format!("image {} was removed meanwhile", plan.spec.image),
            )
        })?;
        let _pin = self.boxes.pin(image.id.as_str());
        let slot = self.network.take()?;
        let made = self.make_in_slot(id, plan, &image, slot).await;
        if made.is_err() {
            self.network.give_back_slot(slot);
        }
        made
    }

    async fn make_in_slot(
        self: &Arc<Self>,
        id: SandboxId,
        plan: &StartPlan,
        image: &Image,
        slot: u32,
    ) -> Result<Observation, RuntimeError> {
        let dir = self.dir(id);
        let spec = self.box_spec(id, plan, image, slot)?;
        let facts = facts_for_shim(&plan.facts);
        let written = private_dir(&dir)
            .and_then(|()| self.write_egress_files(&dir, &spec))
            .and_then(|()| records::write_first_files(&dir, &spec, &facts));
        let started = match written {
            Ok(()) => self.run_shim(&dir).await,
            Err(e) => Err(of_io("spec", "write the sandbox directory", &e)),
        };
        let started = match started {
            Ok(state) => reachable(&spec, &dir).await.map(|ended| ended.unwrap_or(state)),
            Err(e) => Err(e),
        };
        match started {
            Ok(state) => {
                let about: About = serde_json::from_value(spec.about.clone())
                    .map_err(|e| error(RuntimeErrorKind::Failed, "spec", e.to_string()))?;
                let since = since(&state, &spec);
                let known = Known {
                    spec: Arc::new(spec),
                    about: Arc::new(about),
                    facts,
                    state,
                    since,
                    listener: None,
                };
                self.boxes.lock().insert(id, known);
                self.follow(id, None);
                self.boxes.observe(id).ok_or_else(|| no_such_box(id))
            }
            Err(e) => {
                // The shim has torn down what it made; this covers a shim that died, and the directory.
                if let Err(left) = self.clear(id).await {
                    warn!(sandbox = %id, error = %left, "a create that failed left something behind");
                }
                Err(e)
            }
        }
    }

    async fn run_shim(&self, dir: &Path) -> Result<BoxState, RuntimeError> {
        let zygote = self.zygote().map_err(|e| of_io("shim", "start the shim", &e))?;
        let report = zygote.create(dir).map_err(|e| of_io("shim", "start a shim", &e))?;
        let mut report = Channel::of(report).map_err(|e| of_io("shim", "listen to the shim", &e))?;
        // An enforcer has its own time to be ready.
        let patience = CREATE_PATIENCE + self.config.egress.readiness_timeout;
        let outcome = tokio::time::timeout(patience, report.receive::<CreateReport>()).await;
        match outcome {
            Ok(Ok(Some(CreateReport::Created { state, timings }))) => {
                debug!(?timings, "box made");
                Ok(state)
            }
            Ok(Ok(Some(CreateReport::Failed { phase, message }))) => {
                let full = message.contains("No space left") || message.contains("os error 28");
                let kind = match phase.as_str() {
                    _ if full => RuntimeErrorKind::Exhausted,
                    "entrypoint" | "user" | "spec" => RuntimeErrorKind::Invalid,
                    _ => RuntimeErrorKind::Failed,
                };
                Err(error(kind, &phase, message))
            }
            Ok(Ok(None)) => {
                Err(error(RuntimeErrorKind::Failed, "shim", "the shim died before it could report"))
            }
            Ok(Err(e)) => Err(of_io("shim", "read the shim's report", &e)),
            Err(_) => Err(error(RuntimeErrorKind::Failed, "shim", "the shim did not report in time")),
        }
    }

    /// Asks the shim of a known box and takes the answered state over.
    async fn command(&self, id: SandboxId, request: &Request, phase: &str) -> Result<Response, RuntimeError> {
        if !self.boxes.lock().contains_key(&id) {
            return Err(no_such_box(id));
        }
        let answer = ask(&self.dir(id), request).await.map_err(|e| {
            error(RuntimeErrorKind::Failed, phase, format!("the sandbox's shim does not answer: {e}"))
        })?;
        if !answer.ok {
            let message = answer.message.unwrap_or_else(|| "refused without a reason".into());
            return Err(error(RuntimeErrorKind::Failed, phase, message));
        }
        Ok(answer)
    }

    pub(super) async fn freeze(
        &self,
        id: SandboxId,
        request: Request,
        phase: &str,
    ) -> Result<Observation, RuntimeError> {
        let mut answer = self.command(id, &request, phase).await?;
        if answer.state.is_none() {
            answer = self.command(id, &Request::State, phase).await?;
        }
        let state =
            answer.state.ok_or_else(|| error(RuntimeErrorKind::Failed, phase, "the shim told no state"))?;
        self.boxes.set_state(id, state, None).ok_or_else(|| no_such_box(id))
    }
}

/// Connects to the agent once, so that nobody else has to wait for the link.
///
/// The kernel activates a new link a moment after it was set up; a packet sent in between is lost, and the kernel itself repeats it only a
/// second later. Short attempts of our own find the moment. A box that cannot be reached is not running, whatever its shim says.
///
/// Returns the box's last state when it ended before it was reached: a short program is no failure.
async fn reachable(spec: &BoxSpec, dir: &Path) -> Result<Option<BoxState>, RuntimeError> {
    let Some(network) = &spec.network else { return Ok(None) };
    let address = SocketAddr::from((network.address, spec.process.agent_port));
    for attempt in 1..=REACH_ATTEMPTS {
        match tokio::time::timeout(REACH_ATTEMPT, tokio::net::TcpStream::connect(address)).await {
            Ok(Ok(_)) => return Ok(None),
            // Told at once, because the box's network is gone already.
            Ok(Err(_)) => tokio::time::sleep(REACH_ATTEMPT).await,
            Err(_) => {}
        }
        if attempt % LOOK_EVERY == 0
            && let Ok(answer) = ask(dir, &Request::State).await
            && let Some(state) = answer.state.filter(|state| state.phase == Phase::Exited)
        {
            return Ok(Some(state));
        }
    }
    let _ = ask(dir, &Request::Remove { grace_ms: 0 }).await;
    Err(error(RuntimeErrorKind::Failed, "network", format!("the agent cannot be reached at {address}")))
}

#[async_trait]
impl Runtime for EmbeddedRuntime {
    fn name(&self) -> &'static str {
        "embedded"
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            pause: true,
            snapshot: false,
            gpu: false,
            network_policy: true,
            named_volumes: false,
            object_store_volumes: false,
            foreign_platforms: false,
            sockets: true,
            standby: true,
        }
    }

    async fn admit(&self, spec: &Spec) -> Result<(), RuntimeError> {
        if let Some(volume) = spec.volumes.iter().find(|v| !matches!(v.source, VolumeSource::Host { .. })) {
            let message = format!("volume {}: only volumes with a host path are available here", volume.name);
            return Err(error(RuntimeErrorKind::Invalid, "volume", message));
        }
        Ok(())
    }

    async fn prepare(
        &self,
        spec: &Spec,
        secrets: &Secrets,
        progress: &(dyn Fn(PrepareProgress) + Send + Sync),
    ) -> Result<(), RuntimeError> {
        let image = spec.image.as_str();
        if self.shared.find_image(image).await?.is_some() {
            return Ok(());
        }
        progress(PrepareProgress { phase: "pull", message: format!("pulling {image}") });
        let auth = secrets.registry.as_ref().map(|c| sandglass_images::Credentials {
            username: c.username.clone(),
            password: c.password.clone(),
        });
        let platform = spec
            .platform
            .as_ref()
            .map(|p| sandglass_images::Platform { os: p.os.clone(), arch: p.arch.clone() });
        let report = |p: sandglass_images::Progress| {
            progress(PrepareProgress {
                phase: "pull",
                message: format!("{:?}: {} of {} layers", p.phase, p.current, p.layers),
            });
        };
        let pulled =
            self.shared.images.pull(image, auth, platform, &report).await.map_err(|e| of_image(&e))?;
        progress(PrepareProgress { phase: "pull", message: format!("pulled {image}") });
        info!(image, id = %pulled.id, "pulled");
        Ok(())
    }

    async fn start(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        _secrets: &Secrets,
    ) -> Result<Observation, RuntimeError> {
        let shared = &self.shared;
        if let Some(there) = shared.boxes.observe(id) {
            return Ok(there);
        }
        let _busy = Busy::mark(shared, id);
        if shared.dir(id).exists() {
            // Left by an attempt that was cut short; a list would have attached to a shim that lives.
            shared.clear(id).await?;
        }
        shared.make(id, plan).await
    }

    async fn assign(&self, id: SandboxId, plan: &StartPlan) -> Result<Observation, RuntimeError> {
        self.shared.assign(id, plan).await
    }

    async fn image_identity(&self, image: &str) -> Result<String, RuntimeError> {
        let found = self.shared.find_image(image).await?;
        Ok(found.map(|image| image.id.as_str().to_owned()).unwrap_or_default())
    }

    async fn pause(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.shared.freeze(id, Request::Pause, "pause").await
    }

    async fn resume(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        self.shared.freeze(id, Request::Resume, "resume").await
    }

    async fn remove(&self, id: SandboxId, grace: Duration) -> Result<(), RuntimeError> {
        let shared = &self.shared;
        let dir = shared.dir(id);
        let _busy = Busy::mark(shared, id);
        if !dir.exists() {
            shared.end_without_directory(id).await?;
        }
        let deadline = tokio::time::Instant::now() + STARTING;
        while dir.exists() {
            // Before it is asked: one that starts may have its socket a moment later.
            let known = shared.boxes.lock().contains_key(&id);
            end_by_shim(&dir, grace).await?;
            if !dir.exists() || shared.clear(id).await.is_ok() {
                break;
            }
            // A shim that lives but cannot be asked: of a box that is being started its socket is not there yet, of another one it is gone.
            if known || tokio::time::Instant::now() >= deadline || !shim_lives(&dir).await {
                shared.end_without_directory(id).await?;
                shared.clear(id).await?;
                break;
            }
            tokio::time::sleep(ASK_AGAIN).await;
        }
        shared.forget(id);
        Ok(())
    }

    async fn update_facts(&self, id: SandboxId, facts: &MutableFacts) -> Result<Observation, RuntimeError> {
        let shared = &self.shared;
        let dir = shared.dir(id);
        let observed = {
            let mut boxes = shared.boxes.lock();
            let known = boxes.get_mut(&id).ok_or_else(|| no_such_box(id))?;
            let mut next = facts_for_shim(facts);
            next.revision = known.facts.revision + 1;
            records::write_facts(&dir, &next).map_err(|e| match e.kind() {
                io::ErrorKind::NotFound => no_such_box(id),
                _ => of_io("facts", "write facts.json", &e),
            })?;
            known.facts = next;
            shared.boxes.observation(id, known)
        };
        // The file is what counts: a shim reads it before it acts. Telling it is not waited for, because it may be stopped.
        tokio::spawn(async move {
            if let Err(e) = ask(&dir, &Request::FactsChanged).await {
                debug!(sandbox = %id, error = %e, "the shim was not told of new facts");
            }
        });
        Ok(observed)
    }

    async fn inspect(&self, id: SandboxId) -> Result<Option<Observation>, RuntimeError> {
        Ok(self.shared.boxes.observe(id))
    }

    async fn list(&self) -> Result<Vec<Observation>, RuntimeError> {
        self.shared.scan().await?;
        Ok(self.shared.boxes.observe_all())
    }

    fn watch(&self) -> BoxStream<'static, RuntimeEvent> {
        let told = self.shared.boxes.watch();
        tokio::spawn(super::disk::watch(Arc::downgrade(&self.shared)));
        if self.shared.config.host_image {
            // Made ahead, so that the first create does not wait for it; if it fails, that create says why.
            let shared = self.shared.clone();
            tokio::task::spawn_blocking(move || shared.found.make_host(&shared.images).err());
        }
        Box::pin(UnboundedReceiverStream::new(told))
    }

    async fn logs(&self, id: SandboxId, lines: usize) -> Result<Vec<String>, RuntimeError> {
        let dir = self.shared.dir(id);
        let read = tokio::task::spawn_blocking(move || records::tail_console(&dir, lines)).await;
        read.map_err(io::Error::other).flatten().map_err(|e| of_io("logs", "read the console log", &e))
    }

    async fn events(&self, id: SandboxId) -> Result<Vec<BoxEvent>, RuntimeError> {
        let dir = self.shared.dir(id);
        // Lets the shim look at what it is not woken for; without a shim there is nothing new to tell.
        let _ = ask(&dir, &Request::State).await;
        let read = tokio::task::spawn_blocking(move || records::read_events(&dir)).await;
        let events =
            read.map_err(io::Error::other).flatten().map_err(|e| of_io("events", "read the events", &e))?;
        Ok(events.iter().map(history).collect())
    }

    async fn usage(&self, id: SandboxId) -> Result<Usage, RuntimeError> {
        let usage = self.shared.command(id, &Request::State, "usage").await?.usage.unwrap_or_default();
        Ok(Usage { memory_bytes: usage.memory_bytes, cpu_usec: usage.cpu_usec, pids: usage.pids })
    }

    async fn describe(&self, id: SandboxId) -> Result<BTreeMap<String, String>, RuntimeError> {
        let boxes = self.shared.boxes.lock();
        let known = boxes.get(&id).ok_or_else(|| no_such_box(id))?;
        let mut facts = BTreeMap::from([
            ("Image ID".to_owned(), known.about.image_id.clone()),
            ("Layers".to_owned(), known.spec.root.lowers.len().to_string()),
            ("Shim PID".to_owned(), known.state.shim_pid.to_string()),
            ("Host UID base".to_owned(), known.spec.ids.base.to_string()),
            (
                "Started At".to_owned(),
                known.state.started_at_ms.map(Timestamp::clamped).map_or_else(String::new, |t| t.to_string()),
            ),
        ]);
        if let (Phase::Running, Some(pid)) = (known.state.phase, known.state.init_pid) {
            facts.insert("Init PID".to_owned(), pid.to_string());
        }
        if let Some(network) = &known.spec.network {
            facts.insert("Interface".to_owned(), network.host_interface.clone());
        }
        if known.spec.egress.is_some() {
            let enforcer = known.state.enforcer.map_or_else(|| "none".into(), |mark| mark.pid.to_string());
            facts.insert("Egress Enforcer PID".to_owned(), enforcer);
        }
        Ok(facts)
    }

    fn snapshot_image(&self, snapshot: SnapshotId) -> String {
        format!("snapshot-{snapshot}")
    }

    async fn snapshot(&self, _id: SandboxId, _snapshot: SnapshotId) -> Result<(), RuntimeError> {
        let message = "snapshots are not available on the embedded runtime";
        Err(error(RuntimeErrorKind::Invalid, "snapshot", message))
    }

    async fn has_snapshot(&self, _snapshot: SnapshotId) -> Result<bool, RuntimeError> {
        Ok(false)
    }

    async fn still_saves(&self, _snapshot: SnapshotId) -> bool {
        false
    }

    async fn remove_snapshot(&self, _snapshot: SnapshotId) -> Result<(), RuntimeError> {
        Ok(())
    }
}
