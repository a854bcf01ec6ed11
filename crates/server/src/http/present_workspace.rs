//! What is shown of a sandbox beyond a box: its source, agent, services, progress and failure, and the short dialect.

use sandglass_api::lifecycle::{
    Sandbox, SandboxAgent, SandboxFailure, SandboxProgress, SandboxRepository, SandboxService, SandboxSource,
    ServiceExit, SshHostKey,
};
use sandglass_sandbox::{
    Timestamp,
    lifecycle::{
        boot::Failure,
        intent::{Intent, Operation, Progress},
        state::{State, Status},
    },
    ports::runtime::Condition,
    source::RepositorySource,
};
use sandglass_supervise::ports::Exit;

use crate::{
    engine::index::Entry,
    workspace::{AgentView, HostKey, ServiceView, Workspaces},
};

/// There is one box to a sandbox so far: a resume goes on with the same one, a restore makes another sandbox.
pub(super) const GENERATION: u64 = 1;

/// Where a sandbox that is made from a repository comes from.
pub(super) fn source(entry: &Entry) -> Option<SandboxSource> {
    let source = entry.spec()?.source.as_deref()?;
    let waited_for = match progress_of(entry) {
        Some(Progress::Queued { build } | Progress::Building { build }) => Some(*build),
        _ => source.found.as_ref().and_then(|found| found.build),
    };
    let commit = |path: &str| source.found.as_ref().and_then(|found| found.commits.get(path).cloned());
    Some(SandboxSource {
        kind: "repository".to_owned(),
        image_build_id: waited_for.map(|build| build.to_string()),
        image_id: source.found.as_ref().and_then(|found| found.image).map(|image| image.to_string()),
        repositories: source
            .repositories
            .iter()
            .map(|repository| SandboxRepository {
                url: repository.url.clone(),
                reference: repository.reference.clone(),
                commit: commit(&repository.path),
                path: repository.path.clone(),
            })
            .collect(),
    })
}

fn progress_of(entry: &Entry) -> Option<&Progress> {
    match entry.intent.as_deref() {
        Some(Intent { operation: Operation::Create(create), .. }) => Some(&create.progress),
        _ => None,
    }
}

/// Adds what there is beyond a box. `now` dates the uptime.
pub(super) fn complete(
    mut sandbox: Sandbox,
    entry: &Entry,
    workspaces: Option<&Workspaces>,
    now: Timestamp,
) -> Sandbox {
    let Some(source) = entry.spec().and_then(|spec| spec.source.as_deref()) else { return sandbox };
    sandbox.source = self::source(entry);
    if let Some(source) = &mut sandbox.source {
        // The build that a sandbox failed by is the one whose log is wanted.
        let waited_for = || workspaces?.build_of(entry.id).map(|build| build.to_string());
        source.image_build_id = source.image_build_id.take().or_else(waited_for);
    }
    sandbox.generation = Some(GENERATION);
    sandbox.image = sandbox.image.filter(|image| !image.uri.is_empty());
    let view = workspaces.and_then(|workspaces| workspaces.agent(entry.id, source));
    sandbox.progress = entry.status().and_then(|status| progress(entry, &status));
    sandbox.agent = view.as_ref().filter(|_| entry.observed.is_some()).map(agent);
    sandbox.services = Some(services(entry, source, workspaces));
    sandbox.uptime_seconds = Some(uptime(entry, now));
    sandbox.last_failure = failure(entry, view.as_ref());
    sandbox
}

fn services(
    entry: &Entry,
    source: &RepositorySource,
    workspaces: Option<&Workspaces>,
) -> Vec<SandboxService> {
    let views = workspaces.map(|workspaces| workspaces.services(entry.id, source)).unwrap_or_default();
    views.iter().map(service).collect()
}

/// One service.
pub(super) fn service(view: &ServiceView) -> SandboxService {
    SandboxService {
        name: view.name.clone(),
        kind: view.kind.to_owned(),
        state: view.state.clone(),
        required: view.required,
        port: view.port,
        restart_count: view.restart_count,
        last_exit_code: view.last_exit.and_then(Exit::code),
        last_exit: view.last_exit.map(|exit| ServiceExit { code: exit.code(), signal: exit.signal() }),
        last_error: view.last_error.clone(),
        started_at: view.started_at.map(Into::into),
        endpoint: None,
        host_key: view.host_key.as_ref().map(host_key),
    }
}

/// By what an SSH server is known.
pub(super) fn host_key(key: &HostKey) -> SshHostKey {
    SshHostKey { public_key: key.public_key.clone(), fingerprint: key.fingerprint.clone() }
}

fn progress(entry: &Entry, status: &Status) -> Option<SandboxProgress> {
    if status.state != State::Pending {
        return None;
    }
    let phase = entry.agent.as_deref().and_then(|agent| agent.phase.as_ref());
    let phase = phase.filter(|_| status.reason == "booting");
    let deadline = entry.intent.as_deref().map(|intent| intent.deadline);
    Some(SandboxProgress {
        stage: status.reason.to_owned(),
        phase: phase.map(|phase| phase.name.clone()),
        started_at: phase.map(|phase| phase.started_at).or(Some(status.since)).map(Into::into),
        deadline_at: phase.and_then(|phase| phase.deadline_at).or(deadline).map(Into::into),
        message: phase.and_then(|phase| phase.message.clone()).or_else(|| status.message.clone()),
    })
}

fn agent(view: &AgentView) -> SandboxAgent {
    SandboxAgent {
        state: view.facts.link.word().to_owned(),
        version: view.version.clone(),
        last_heartbeat_at: view.heartbeat_at.map(Into::into),
        lease_expires_at: view.lease_expires_at.map(Into::into),
    }
}

fn failure(entry: &Entry, view: Option<&AgentView>) -> Option<SandboxFailure> {
    let of = |failure: &Failure| SandboxFailure {
        reason: failure.reason.word().to_owned(),
        phase: failure.phase.clone(),
        message: Some(failure.message.clone()),
        exit_code: failure.exit_code,
        signal: failure.signal,
        output_tail: Some(failure.output_tail.clone()).filter(|tail| !tail.is_empty()),
    };
    if let Some(Progress::Failed { failure: Some(failure), .. }) = progress_of(entry) {
        return Some(of(failure));
    }
    view.and_then(|view| view.facts.failure.as_ref().or(view.facts.passed_over.as_ref())).map(of)
}

/// Seconds since the sandbox was first of use, until its end.
fn uptime(entry: &Entry, now: Timestamp) -> u64 {
    let Some(observed) = entry.observed.as_deref() else { return 0 };
    let begun = match entry.spec().and_then(|spec| spec.source.as_ref()) {
        Some(_) => entry.agent.as_deref().and_then(|agent| agent.ready_at),
        None => observed.started_at,
    };
    let ended = match (&observed.condition, progress_of(entry)) {
        (Condition::Exited(exit), _) => exit.at,
        (_, Some(Progress::Failed { at, .. })) => *at,
        _ => now,
    };
    begun.map_or(0, |begun| begun.until(ended).as_secs())
}

/// Adds the words of the short dialect, in which sandboxes are made from repositories only: all others look as clients know them.
pub(super) fn in_short(mut sandbox: Sandbox, entry: &Entry, now: Timestamp) -> Sandbox {
    if entry.spec().is_none_or(|spec| spec.source.is_none()) {
        return sandbox;
    }
    sandbox.seed_state = entry.status().map(|status| short_state(&status).to_owned());
    sandbox.seed_uptime_seconds = Some(uptime(entry, now));
    sandbox
}

/// The state in the short dialect.
fn short_state(status: &Status) -> &'static str {
    match (status.state, status.reason) {
        (State::Pending, "accepted" | "image_resolving" | "ACCEPTED") => "SCHEDULED",
        (State::Pending, "image_build_queued" | "image_building" | "image_pulling" | "PREPARING_IMAGE") => {
            "BUILDING"
        }
        (State::Pending, _) => "STARTING",
        (State::Running, "unresponsive") => "UNHEALTHY",
        (State::Running, _) => "READY",
        (State::Pausing | State::Paused | State::Resuming, _) => "PAUSED",
        (State::Stopping, _) => "STOPPING",
        (State::Terminated, _) => "STOPPED",
        (State::Failed, _) => "FAILED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_its_short_word() {
        for (state, reason, short) in [
            (State::Pending, "accepted", "SCHEDULED"),
            (State::Pending, "image_resolving", "SCHEDULED"),
            (State::Pending, "image_build_queued", "BUILDING"),
            (State::Pending, "image_building", "BUILDING"),
            (State::Pending, "image_pulling", "BUILDING"),
            (State::Pending, "container_creating", "STARTING"),
            (State::Pending, "agent_connecting", "STARTING"),
            (State::Pending, "booting", "STARTING"),
            (State::Running, "ready", "READY"),
            (State::Running, "degraded", "READY"),
            (State::Running, "unresponsive", "UNHEALTHY"),
            (State::Pausing, "PAUSING", "PAUSED"),
            (State::Stopping, "USER_DELETE", "STOPPING"),
            (State::Terminated, "CONTAINER_EXITED", "STOPPED"),
            (State::Failed, "heartbeat_lost", "FAILED"),
        ] {
            let status = Status { state, reason, message: None, since: Timestamp::clamped(0) };
            assert_eq!(short_state(&status), short, "{state:?} {reason}");
        }
    }
}
