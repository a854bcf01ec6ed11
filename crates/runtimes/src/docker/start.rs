//! The way from a plan to a running box: create, start, look, until the agent answers.
//!
//! As few calls as the engine allows, because each costs the caller time: the create itself finds out whether the box exists, and the
//! image was looked at by `prepare`. Invariant: a failure leaves nothing behind, and whatever a killed server leaves is found by the id.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    sync::Arc,
    time::Duration,
};

use bollard::{
    models::{ContainerCreateBody, HealthConfig, HostConfig, Mount},
    query_parameters::{CreateContainerOptions, StartContainerOptions, WaitContainerOptions},
};
use futures_util::StreamExt;
use sandglass_sandbox::{
    SandboxId, hooks,
    ports::{
        RuntimeErrorKind,
        runtime::{Condition, Exposure, Observation, RuntimeError, StartPlan},
    },
    spec::{Secrets, Spec},
};

use crate::enforcement;

use super::{
    Made, Shared,
    agent::{self, AGENT_PORT},
    client::CONNECT_PATIENCE,
    delivery,
    errors::{Failure, failed, invalid, is_port_clash},
    host_config,
    image::{self, ImageFacts},
    labels,
    network::{self, Mode, Taken},
    observe::container_name,
    reach, sidecar, windows,
};

const ROOT: &str = "0:0";
/// Times that other host ports are tried.
const PORT_ATTEMPTS: u32 = 3;
/// Times that anything else in the way is cleared.
const CLEARINGS: u32 = 3;
/// How long an agent may take to answer. It takes milliseconds, on a machine that is not overwhelmed.
const AGENT_PATIENCE: Duration = Duration::from_secs(60);
/// A box that answers does so before this; only then is it worth watching whether it ended.
const BEFORE_WATCHING: Duration = Duration::from_millis(100);

/// Marks an id as being made for as long as it lives.
struct Making<'a>(&'a Shared, SandboxId);

impl<'a> Making<'a> {
    fn mark(shared: &'a Shared, id: SandboxId) -> Self {
        shared.making().insert(id);
        Self(shared, id)
    }
}

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.making().remove(&self.1);
    }
}

/// What one box is made from; nothing in it changes between attempts.
struct Parts<'a> {
    id: SandboxId,
    plan: &'a StartPlan,
    image: Arc<ImageFacts>,
    argv: Vec<String>,
    mounts: Vec<Mount>,
    /// The container of the sidecar.
    sidecar: Option<String>,
}

/// The engine would run a check of the image in the box whenever it is due, also while a build searches what is left in it.
fn no_checks() -> HealthConfig {
    HealthConfig { test: Some(vec!["NONE".to_owned()]), ..HealthConfig::default() }
}

impl Parts<'_> {
    fn spec(&self) -> &Spec {
        &self.plan.spec
    }

    /// The image's user, where the agent itself is another one.
    fn user_apart(&self) -> Option<&str> {
        let apart = self.plan.root_agent && !self.image.user.is_empty() && !self.is_windows();
        apart.then_some(self.image.user.as_str())
    }

    fn is_windows(&self) -> bool {
        self.spec().platform.as_ref().is_some_and(windows::is_windows)
    }
}

impl Shared {
    /// Checks what only the engine and its host can know.
    pub(super) async fn admit(&self, spec: &Spec) -> Result<(), RuntimeError> {
        let ping = self.client.call_within(CONNECT_PATIENCE, |d| async move { d.ping().await });
        ping.await.map_err(|e| e.during("engine"))?;
        if spec.platform.as_ref().is_some_and(windows::is_windows) {
            windows::admit()?;
        }
        self.admit_network(spec.egress.is_some()).await?;
        if spec.secure_access {
            self.admit_secure_access()?;
        }
        if spec.egress.is_some() {
            self.admit_enforcer().await?;
            if spec.platform.as_ref().is_some_and(windows::is_windows) {
                let message =
                    "a network policy cannot be enforced in a Windows sandbox, which makes its own network";
                return Err(invalid("network", message));
            }
            if self.config.secure_runtime.as_deref().is_some_and(|name| name.contains("runsc")) {
                return Err(invalid("network", "gVisor cannot enforce a network policy"));
            }
            if host_config::divides_itself(spec) {
                let message = "a network policy cannot hold a sandbox that has the extension bootstrap.execd.isolation                                on this runtime; leave one of them out";
                return Err(invalid("network", message));
            }
        }
        self.admit_volumes(spec).await
    }

    /// Makes and starts a box. See `Runtime::start`.
    pub(super) async fn start(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        secrets: &Secrets,
    ) -> Result<Observation, RuntimeError> {
        let _making = Making::mark(self, id);
        if plan.spec.egress.is_some() {
            // A sidecar must not be made for a box that has one.
            if let Some(there) = self.already_there(id).await? {
                return Ok(there);
            }
        }
        let mut made = Made::default();
        match self.make(id, plan, secrets, &mut made).await {
            Ok(observed) => {
                self.known().insert(id);
                Ok(observed)
            }
            Err(e) => {
                self.undo(id, &made).await;
                Err(e)
            }
        }
    }

    /// Removes everything that a failed attempt made.
    async fn undo(&self, id: SandboxId, made: &Made) {
        let mut outcomes = Vec::new();
        if made.container {
            outcomes.push(self.remove_container(&container_name(id)).await);
        }
        if made.sidecar {
            outcomes.push(self.remove_container(&sidecar::container_name(id)).await);
        }
        if !made.volumes.is_empty() {
            outcomes.push(self.remove_volumes(id, &made.volumes).await);
        }
        self.release_object_stores(id, &made.object_stores).await;
        for error in outcomes.into_iter().filter_map(Result::err) {
            tracing::warn!(sandbox = %id, %error, "a create that failed left something behind");
        }
    }

    /// The box of that id, if there is one that was ever started. One that was not is a leftover and is removed.
    async fn already_there(&self, id: SandboxId) -> Result<Option<Observation>, RuntimeError> {
        let observed = self.observe(id).await.map_err(|e| e.during("start"))?;
        let Some(observed) = observed else { return Ok(None) };
        match observed.condition {
            Condition::Starting => {
                self.remove_container(&container_name(id)).await?;
                Ok(None)
            }
            Condition::Running if observed.spec.platform.as_ref().is_none_or(|p| !windows::is_windows(p)) => {
                self.until_ready(observed).await.map(Some)
            }
            Condition::Running | Condition::Paused | Condition::Exited(_) => Ok(Some(observed)),
        }
    }

    async fn make(
        &self,
        id: SandboxId,
        plan: &StartPlan,
        secrets: &Secrets,
        made: &mut Made,
    ) -> Result<Observation, RuntimeError> {
        let image = self.image_facts(&plan.spec.image).await?;
        let argv = image::entrypoint(&plan.spec.entrypoint, &image)?;
        // The pins are held until the container has started and has mounts of its own.
        let (mounts, _pins) = self.mount_volumes(id, &plan.spec, secrets, made).await?;
        let mut parts = Parts { id, plan, image, argv, mounts, sidecar: None };
        if parts.is_windows() {
            // Left to the engine, nothing would tell whose it is.
            made.volumes.push(windows::oem_volume(id));
            self.create_volume(&windows::oem_volume(id), Some(id), plan.spec.tenant.as_deref()).await?;
        }
        let mut taken = None;
        if let Some(egress) = &plan.spec.egress {
            let host = self.publish_host(&plan.spec);
            if host.is_some() {
                taken = Some(self.publish(id, true, 0).await?);
            }
            let token = sidecar::Token::random();
            made.sidecar = true;
            made.volumes.push(sidecar::runtime_volume(id));
            made.published = taken.as_ref().map(|taken| taken.published);
            let host = host.unwrap_or(Ipv4Addr::LOCALHOST);
            let wanted = sidecar::Wanted { id, egress, published: made.published, host, token: &token };
            parts.sidecar = Some(self.start_sidecar(wanted).await?);
            made.egress_token = Some(token.0);
        }
        let (mut port_attempts, mut clearings) = (0, 0);
        loop {
            if parts.sidecar.is_none() {
                taken = self.publish_box(&parts).await?;
                made.published = taken.as_ref().map(|taken| taken.published);
            }
            let clash = match self.attempt(&parts, made, taken.as_ref()).await? {
                Attempt::Started(observed) => {
                    if let Some(taken) = taken {
                        taken.reservation.keep();
                    }
                    return Ok(*observed);
                }
                // It has ports of its own; those that were just taken are given back.
                Attempt::WasThere(observed) => return Ok(*observed),
                Attempt::Cleared(failure) => {
                    clearings += 1;
                    (clearings > CLEARINGS).then_some(failure)
                }
                Attempt::PortsTaken(failure) => {
                    self.remove_container(&container_name(id)).await?;
                    port_attempts += 1;
                    (port_attempts >= PORT_ATTEMPTS || parts.sidecar.is_some()).then_some(failure)
                }
            };
            if let Some(failure) = clash {
                return Err(failure.during("start"));
            }
        }
    }

    /// The host ports of a box without a sidecar; none on the host's own network, and none of a box that only the server may reach.
    async fn publish_box(&self, parts: &Parts<'_>) -> Result<Option<Taken<'_>>, RuntimeError> {
        if self.publish_host(parts.spec()).is_none() {
            return Ok(None);
        }
        if Mode::of(&self.config) != Mode::Host {
            let extra = if parts.is_windows() { windows::PORTS.len() } else { 0 };
            return self.publish(parts.id, false, extra).await.map(Some);
        }
        let in_use =
            self.config.engine.is_local() && TcpListener::bind((Ipv4Addr::UNSPECIFIED, AGENT_PORT)).is_err();
        if in_use {
            let message = format!(
                "port {AGENT_PORT} of the host is in use: on the host's network there can be one sandbox at a time; \
                 set [docker] network_mode = \"bridge\""
            );
            return Err(RuntimeError::new(RuntimeErrorKind::Exhausted, "ports", message));
        }
        Ok(None)
    }

    async fn attempt(
        &self,
        parts: &Parts<'_>,
        made: &mut Made,
        taken: Option<&Taken<'_>>,
    ) -> Result<Attempt, RuntimeError> {
        let mount = self.agent.mount();
        let upload = mount.is_none();
        let body = self.body(parts, made, taken, mount)?;
        let platform = parts.spec().platform.as_ref().filter(|p| !windows::is_windows(p));
        let options = CreateContainerOptions {
            name: Some(container_name(parts.id)),
            platform: platform.map_or_else(String::new, |p| format!("{}/{}", p.os, p.arch)),
        };
        made.container = true;
        let created =
            self.client.call(|d| async move { d.create_container(Some(options), body).await }).await;
        let container = match created {
            Ok(created) => created.id,
            Err(failure) => {
                // What has the name may be somebody else's.
                made.container = failure.status() != Some(409);
                return self.after_refused_create(parts, failure).await;
            }
        };
        if parts.is_windows() {
            self.upload_windows_agent(&container).await?;
        } else if upload {
            self.upload_agent(&container).await?;
            self.upload_delivery(&container, &parts.plan.delivery).await?;
        }
        let name = &container;
        let started = self
            .client
            .call(|d| async move { d.start_container(name, None::<StartContainerOptions>).await })
            .await;
        match started {
            Ok(()) => {}
            Err(failure) if is_port_clash(&failure.to_string()) => return Ok(Attempt::PortsTaken(failure)),
            // Engines find out late that a network does not exist.
            Err(Failure::Refused { status: 404, message }) if message.contains("network") => {
                return Err(network::absent_network(&self.config.network_mode));
            }
            Err(failure) => return Err(of_start(&failure)),
        }
        let observed = self.observe(parts.id).await.map_err(|e| e.during("start"))?;
        let observed =
            observed.ok_or_else(|| failed("start", "the container was removed while it started"))?;
        let observed = if parts.is_windows() { observed } else { self.until_ready(observed).await? };
        Ok(Attempt::Started(Box::new(observed)))
    }

    /// What a refused create means: an existing box, something that was in the way and is not any more, or a failure.
    async fn after_refused_create(
        &self,
        parts: &Parts<'_>,
        failure: Failure,
    ) -> Result<Attempt, RuntimeError> {
        let image = &parts.spec().image;
        match &failure {
            Failure::Refused { status: 409, .. } => match self.already_there(parts.id).await? {
                Some(there) => Ok(Attempt::WasThere(Box::new(there))),
                None => {
                    self.refuse_strangers(parts.id).await?;
                    Ok(Attempt::Cleared(failure))
                }
            },
            Failure::Refused { message, .. } if is_port_clash(message) => Ok(Attempt::PortsTaken(failure)),
            Failure::Refused { status: 404, message } if message.contains("image") => {
                self.images.forget(image);
                let message = format!("image {image} was removed meanwhile");
                Err(RuntimeError::new(RuntimeErrorKind::ImagePull, "image", message))
            }
            Failure::Refused { status: 404, message } if message.contains("network") => {
                Err(network::absent_network(&self.config.network_mode))
            }
            refused if self.agent.is_out_of_sight(refused) => Ok(Attempt::Cleared(failure)),
            other => Err(other.during("create")),
        }
    }

    /// A container that has the name of a sandbox and is none belongs to somebody else.
    async fn refuse_strangers(&self, id: SandboxId) -> Result<(), RuntimeError> {
        let name = container_name(id);
        let stranger = self.inspect_container(&name).await.map_err(|e| e.during("create"))?;
        if stranger.is_none() {
            return Ok(());
        }
        let message = format!("there is a container {name} that is not a sandbox; it is left alone");
        Err(RuntimeError::new(RuntimeErrorKind::Exists, "create", message))
    }

    /// What the engine is told to make.
    fn body(
        &self,
        parts: &Parts<'_>,
        made: &Made,
        taken: Option<&Taken<'_>>,
        agent: Option<Mount>,
    ) -> Result<ContainerCreateBody, RuntimeError> {
        let spec = parts.spec();
        let windows = parts.is_windows();
        let mut host = host_config::confined(&self.config, self.seccomp.as_deref(), spec);
        let mut mounts = parts.mounts.clone();
        let mut exposed = Vec::new();
        let mode = Mode::of(&self.config);
        let mut networking = None;
        if let Some(sidecar) = &parts.sidecar {
            host.network_mode = Some(format!("container:{sidecar}"));
            share_runtime_volume(&mut host, &mounts, parts.id);
        } else {
            host.network_mode = Some(mode.name().to_owned());
            networking = mode.endpoints();
            if let Some(taken) = taken {
                let pairs = pairs(taken);
                let pairs: Vec<_> = pairs.iter().map(|(port, host)| (port.as_str(), *host)).collect();
                let publish_host = self.publish_host(spec).unwrap_or(Ipv4Addr::LOCALHOST);
                let (bindings, ports) = network::bindings(&pairs, &publish_host.to_string());
                host.port_bindings = Some(bindings);
                exposed = ports;
            }
        }
        if windows {
            windows::adapt(&mut host, parts.id);
        } else {
            if agent.is_some() {
                mounts.extend(parts.plan.delivery.iter().map(delivery::mount));
            }
            mounts.extend(agent);
        }
        host.mounts.get_or_insert_default().append(&mut mounts);
        let (entrypoint, cmd) = if windows {
            (None, Some(parts.argv.clone()))
        } else {
            (Some(agent::command(parts.user_apart(), spec.standby.is_some())), Some(parts.argv.clone()))
        };
        Ok(ContainerCreateBody {
            image: Some(spec.image.clone()),
            env: Some(environment(parts, &exposed, self.config.run_as_init)),
            entrypoint,
            cmd: cmd.filter(|argv| !argv.is_empty()),
            user: parts.user_apart().map(|_| ROOT.to_owned()),
            labels: Some(labels::for_create(parts.id, parts.plan, &parts.argv, made, &parts.image.labels)),
            healthcheck: parts.plan.root_agent.then(no_checks),
            attach_stdout: Some(true),
            attach_stderr: Some(true),
            exposed_ports: Some(exposed).filter(|e| !e.is_empty()),
            networking_config: networking,
            host_config: Some(host),
            ..ContainerCreateBody::default()
        })
    }

    /// Waits until the agent answers, or the box has ended, whichever comes first.
    async fn until_ready(&self, observed: Observation) -> Result<Observation, RuntimeError> {
        let id = observed.id;
        let Some(address) = self.agent_address(&observed).await? else { return Ok(observed) };
        let ended = async {
            tokio::time::sleep(BEFORE_WATCHING).await;
            self.until_ended(id).await
        };
        tokio::select! {
            biased;
            () = reach::until_agent_answers(address) => Ok(observed),
            watched = ended => {
                watched.map_err(|e| e.during("start"))?;
                self.after_early_end(id).await
            }
            () = tokio::time::sleep(AGENT_PATIENCE) => {
                let message = format!("the agent did not answer at {address} within {} s", AGENT_PATIENCE.as_secs());
                Err(failed("agent", message))
            }
        }
    }

    /// Where the agent of a box is reached from this process.
    pub(super) async fn agent_address(
        &self,
        observed: &Observation,
    ) -> Result<Option<SocketAddr>, RuntimeError> {
        let published_on = self.publish_host(&observed.spec).unwrap_or(Ipv4Addr::LOCALHOST);
        match (observed.exposure, observed.address) {
            // A sidecar may let only published ports through.
            (Exposure::Published { agent, egress: Some(_), .. }, _)
            | (Exposure::Published { agent, .. }, None) => {
                self.published_address(published_on, agent).await.map(Some)
            }
            (_, Some(address)) => Ok(Some(SocketAddr::new(address, AGENT_PORT))),
            (_, None) => Ok(None),
        }
    }

    async fn until_ended(&self, id: SandboxId) -> Result<(), Failure> {
        let name = &container_name(id);
        let options = WaitContainerOptions { condition: "not-running".to_owned() };
        let waited = self.client.call_patiently(|d| async move {
            // Whatever it says, it says it when the container has ended.
            match d.wait_container(name, Some(options)).next().await {
                Some(Err(bollard::errors::Error::DockerContainerWaitError { .. }) | Ok(_)) | None => Ok(()),
                Some(Err(e)) => Err(e),
            }
        });
        waited.await
    }

    /// A box that ended before its agent answered: because it was that quick, or because it could not run.
    async fn after_early_end(&self, id: SandboxId) -> Result<Observation, RuntimeError> {
        let observed = self.observe(id).await.map_err(|e| e.during("start"))?;
        let observed =
            observed.ok_or_else(|| failed("start", "the container was removed while it started"))?;
        let Condition::Exited(exit) = &observed.condition else { return Ok(observed) };
        let words = self.last_words(id).await.unwrap_or_default();
        match (exit.code, agent_complaint(&words)) {
            // The observation tells about it: the box was started, and its own program was not.
            (_, Some(complaint)) if is_of_hook(&complaint) => Ok(observed),
            (Some(127), Some(complaint)) => Err(invalid("entrypoint", complaint)),
            (_, Some(complaint)) => Err(failed("agent", complaint)),
            _ => Ok(observed),
        }
    }

    pub(super) async fn last_words(&self, id: SandboxId) -> Result<Vec<String>, Failure> {
        self.last_words_of(&container_name(id)).await
    }

    /// What a container said last on its standard error.
    pub(super) async fn last_words_of(&self, name: &str) -> Result<Vec<String>, Failure> {
        use bollard::query_parameters::LogsOptions;
        let options = LogsOptions { stderr: true, tail: "20".to_owned(), ..LogsOptions::default() };
        let read = self.client.call(|d| async move {
            let mut lines = Vec::new();
            let mut chunks = d.logs(name, Some(options));
            while let Some(chunk) = chunks.next().await {
                lines.extend(String::from_utf8_lossy(&chunk?.into_bytes()).lines().map(str::to_owned));
            }
            Ok(lines)
        });
        read.await
    }
}

/// How one attempt ended that did not fail for good.
enum Attempt {
    Started(Box<Observation>),
    WasThere(Box<Observation>),
    /// What was in the way is not any more.
    Cleared(Failure),
    PortsTaken(Failure),
}

fn of_start(failure: &Failure) -> RuntimeError {
    let message = failure.to_string();
    if message.contains("exec format error") {
        return failed("agent", "the agent cannot run in this image: it is made for another architecture");
    }
    let missing =
        message.contains("executable file not found") || message.contains("no such file or directory");
    // With an agent the engine executes nothing else; so it is the one that is missing.
    if missing && message.contains("exec") && message.contains(agent::TARGET) {
        return failed("agent-copy", message);
    }
    if missing && message.contains("exec:") {
        return invalid("entrypoint", message);
    }
    failure.during("start")
}

/// What the agent said about itself, if it did.
pub(super) fn agent_complaint(words: &[String]) -> Option<String> {
    words.iter().rev().find_map(|line| line.trim().strip_prefix("execd: ")).map(str::to_owned)
}

/// Whether the agent complained of the hook before the entrypoint.
pub(super) fn is_of_hook(complaint: &str) -> bool {
    complaint.starts_with("preStart: ")
}

/// The sidecar's volume under the agent's directory, unless something is mounted there.
fn share_runtime_volume(host: &mut HostConfig, mounts: &[Mount], id: SandboxId) {
    let binds = host.binds.get_or_insert_default();
    let taken = mounts.iter().any(|mount| mount.target.as_deref() == Some(agent::HOME))
        || binds.iter().any(|bind| bind.split(':').nth(1) == Some(agent::HOME));
    if !taken {
        binds.push(format!("{}:{}:rw", sidecar::runtime_volume(id), agent::HOME));
    }
}

/// The container's and the host's ports of a box.
fn pairs(taken: &Taken<'_>) -> Vec<(String, u16)> {
    let mut pairs = network::pairs(taken.published);
    pairs.extend(windows::PORTS.iter().map(|port| (*port).to_owned()).zip(taken.extra.iter().copied()));
    pairs
}

/// The environment of a box: as asked for, then what it is. Each name once; later wins.
fn environment(parts: &Parts<'_>, exposed: &[String], run_as_init: bool) -> Vec<String> {
    let spec = parts.spec();
    let mut env = spec.env.clone();
    if parts.is_windows() {
        windows::size(&mut env, &spec.limits, exposed);
    }
    let mut ours = Vec::new();
    if run_as_init {
        ours.push(("EXECD_INIT", "1".to_owned()));
    }
    if spec.egress.as_ref().is_some_and(|egress| egress.credential_proxy) {
        ours.push((enforcement::TRANSPARENT, "true".to_owned()));
    }
    // Without a token of ours none of the image's or the request's may count either.
    ours.push(("EXECD_ACCESS_TOKEN", parts.plan.agent_token.clone()));
    ours.push(("OPENSANDBOX_ID", parts.id.to_string()));
    if !spec.hooks.is_empty() {
        ours.push((hooks::VARIABLE, spec.hooks.to_json()));
    }
    env.extend(ours.into_iter().map(|(name, value)| (name.to_owned(), value)));
    let mut once: Vec<(String, String)> = Vec::with_capacity(env.len());
    for (name, value) in env {
        once.retain(|(known, _)| *known != name);
        once.push((name, value));
    }
    once.into_iter().map(|(name, value)| format!("{name}={value}")).collect()
}

#[cfg(test)]
#[path = "start_tests.rs"]
mod tests;
