//! The calls that agents make: from HTTP to the registry and to what is kept.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use http::{HeaderMap, Method, Request, Response, header, request::Parts};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use sandglass_bridge::{
    server::{Admitted, Caller, FatalVerdict, LogPiece, Settled, Ticket},
    wire::{
        AckedLog, Activity, AttachRequest, EventsReply, FatalReport, GitCredentialRequest, Heartbeat,
        LogFrame, LogsRequest, Outcome, Refusal,
        limits::{
            MAX_EVENTS_BYTES, MAX_FATAL_BYTES, MAX_LOGS_BODY_BYTES, MAX_MESSAGE_BYTES, STREAM_KEEP_ALIVE,
        },
        paths, read_events, sse,
    },
};
use sandglass_sandbox::SandboxId;
use tracing::{info, warn};

use super::{
    Workspaces,
    answer::{Body, Unanswered, body, json, read, wall},
    desk::{Desk, Pulse},
    room::Place,
    sources, told,
};
use crate::engine::policies::Signs;

/// Who makes a call, as its headers say; owned, because a stream outlives its request.
#[derive(Clone)]
struct Speaker {
    sandbox: String,
    generation: u64,
    token: String,
    lease: String,
}

impl Speaker {
    fn of(headers: &HeaderMap) -> Self {
        let text = |name: &str| {
            headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default().to_owned()
        };
        let bearer = text(header::AUTHORIZATION.as_str());
        Self {
            sandbox: text(paths::SANDBOX_HEADER),
            generation: text(paths::GENERATION_HEADER).parse().unwrap_or(0),
            token: bearer.strip_prefix("Bearer ").unwrap_or_default().to_owned(),
            lease: text(paths::LEASE_HEADER),
        }
    }

    fn caller(&self) -> Caller<'_> {
        Caller {
            sandbox: &self.sandbox,
            generation: self.generation,
            token: &self.token,
            lease: Some(self.lease.as_str()).filter(|lease| !lease.is_empty()),
        }
    }
}

/// What a call came over.
#[derive(Clone)]
pub(super) enum Way {
    /// The socket of this sandbox.
    Socket(SandboxId),
    /// The listener for the agents of all.
    Network(Arc<Place>),
}

/// Answers one call.
pub(super) async fn answer(
    workspaces: Arc<Workspaces>,
    way: &Way,
    request: Request<Incoming>,
) -> Response<Body> {
    let (parts, incoming) = request.into_parts();
    match workspaces.called(way, &parts, incoming).await {
        Ok(response) => response,
        Err(unanswered) => unanswered.response(),
    }
}

/// What counts as use of what a heartbeat carries; the heartbeat itself does not.
pub(super) fn signs(activity: &Activity) -> Signs {
    Signs {
        at_work: activity.commands > 0 || activity.leases > 0,
        present: activity.ptys > 0 || activity.ssh_sessions > 0 || activity.proxy_connections > 0,
    }
}

impl Workspaces {
    async fn called(
        self: &Arc<Self>,
        way: &Way,
        parts: &Parts,
        incoming: Incoming,
    ) -> Result<Response<Body>, Unanswered> {
        let speaker = Speaker::of(&parts.headers);
        if matches!(way, Way::Socket(of) if of.to_string() != speaker.sandbox) {
            return Err(Refusal::WrongSandbox.into());
        }
        // Nobody waits for the body of a caller that says nothing of worth.
        self.with_registry(|registry, _| registry.authenticate(&speaker.caller()))?;
        if matches!(way, Way::Network(place) if !place.recognise(&speaker.sandbox)) {
            return Err(Unanswered::TooMany);
        }
        match (&parts.method, parts.uri.path()) {
            (&Method::POST, paths::ATTACH) => {
                let request = read(&body(incoming, MAX_MESSAGE_BYTES).await?)?;
                self.attached(&speaker, &request)
            }
            (&Method::POST, paths::HEARTBEAT) => {
                let heartbeat = read(&body(incoming, MAX_MESSAGE_BYTES).await?)?;
                self.beat(&speaker, heartbeat)
            }
            (&Method::POST, paths::EVENTS) => {
                let batch = body(incoming, MAX_EVENTS_BYTES).await?;
                self.events(&speaker, &batch).await
            }
            (&Method::POST, paths::LOGS) => {
                let logs = read(&body(incoming, MAX_LOGS_BODY_BYTES).await?)?;
                self.logs(&speaker, logs).await
            }
            (&Method::POST, paths::FATAL) => {
                let report = read(&body(incoming, MAX_FATAL_BYTES).await?)?;
                self.fatal(&speaker, &report).await
            }
            (&Method::POST, paths::GIT_CREDENTIAL) => {
                let asked = read(&body(incoming, MAX_MESSAGE_BYTES).await?)?;
                self.git_credential(&speaker, &asked)
            }
            (&Method::GET, paths::STREAM) => {
                let after = parts.headers.get(paths::LAST_EVENT_ID).and_then(|id| id.to_str().ok());
                self.stream(speaker, after.map(str::to_owned))
            }
            (&Method::POST, path) => {
                let command = paths::command_of_result(path).ok_or(Unanswered::NoSuchCall)?;
                let outcome: Outcome = read(&body(incoming, MAX_MESSAGE_BYTES).await?)?;
                let settled =
                    self.with_registry(|registry, _| registry.settle(&speaker.caller(), command))?;
                if settled == Settled::First {
                    self.commands.settle(command, outcome);
                }
                Ok(json(&serde_json::json!({})))
            }
            _ => Err(Unanswered::NoSuchCall),
        }
    }

    async fn logs(&self, speaker: &Speaker, logs: LogsRequest) -> Result<Response<Body>, Unanswered> {
        let desk = self.speaking(speaker)?;
        let mut frames = logs.frames;
        let passed_over = self.pass_over(&desk, &mut frames).ok_or(Unanswered::NotNow)?;
        let taken = self.with_registry(|registry, _| registry.logs(&speaker.caller(), frames))?;
        let mut batch = taken.map_err(|e| Unanswered::Malformed(e.to_string()))?;
        self.keep_output(&desk, batch.pieces).await;
        batch.reply.acked.extend(passed_over);
        Ok(json(&batch.reply))
    }

    /// Takes out of some output what nothing declared has written. `None` while it is not known what the sandbox is, after a start.
    pub(super) fn pass_over(&self, desk: &Desk, frames: &mut Vec<LogFrame>) -> Option<Vec<AckedLog>> {
        let entry = self.engine()?.index().get(desk.id)?;
        Some(sources::take_out_undeclared(entry.spec()?, frames))
    }

    /// What cannot be written is lost here and stays with the agent: the output of a program is no reason to stop listening.
    pub(super) async fn keep_output(&self, desk: &Desk, pieces: Vec<LogPiece>) {
        let outputs = self.folders.outputs(desk.id);
        let written = {
            // One at a time, and none after the sandbox is forgotten.
            let _writing = desk.writing.lock().await;
            if desk.closing.is_cancelled() {
                return;
            }
            tokio::task::spawn_blocking(move || outputs.append(&pieces)).await
        };
        if let Some(error) = written.map_err(std::io::Error::other).and_then(|done| done).err() {
            warn!(sandbox = %desk.id, %error, "the output of a sandbox cannot be kept");
        }
    }

    fn speaking(&self, speaker: &Speaker) -> Result<Arc<Desk>, Unanswered> {
        let id = speaker.sandbox.parse::<SandboxId>().map_err(|_| Refusal::Unknown)?;
        self.desk(id).ok_or(Unanswered::Refused(Refusal::Gone))
    }

    /// When the sandbox expires, as the engine has it.
    fn expires_at(&self, id: SandboxId) -> Option<jiff::Timestamp> {
        let entry = self.engine()?.index().get(id)?;
        entry.facts()?.expires_at.map(wall)
    }

    fn attached(&self, speaker: &Speaker, request: &AttachRequest) -> Result<Response<Body>, Unanswered> {
        let now = wall(self.clock.now());
        let desk = self.speaking(speaker);
        let mut reply = self.with_registry(|registry, moment| {
            let reply = registry.attach(&speaker.caller(), request, moment, now)?;
            if let Ok(desk) = &desk {
                // Before the notice is acted on, which tells it.
                let version = request.agent_version.chars().take(64).collect();
                desk.note(|kept| kept.agent_version = Some(version));
            }
            Ok::<_, Refusal>(reply)
        })?;
        let desk = desk?;
        self.sooner.notify_one();
        info!(sandbox = %desk.id, version = request.agent_version, "the agent is attached");
        reply.expires_at = self.expires_at(desk.id);
        Ok(json(&reply))
    }

    fn beat(&self, speaker: &Speaker, heartbeat: Heartbeat) -> Result<Response<Body>, Unanswered> {
        let mut reply = self.with_registry(|registry, now| registry.heartbeat(&speaker.caller(), now))?;
        let desk = self.speaking(speaker)?;
        if let Some(engine) = self.engine() {
            engine.heard(desk.id, signs(&heartbeat.activity));
        }
        *desk.pulse() = Pulse {
            heartbeat_at: Some(self.clock.now()),
            activity: heartbeat.activity,
            load: heartbeat.load,
            health: heartbeat.services,
        };
        reply.expires_at = self.expires_at(desk.id);
        Ok(json(&reply))
    }

    async fn events(&self, speaker: &Speaker, batch: &[u8]) -> Result<Response<Body>, Unanswered> {
        let events = read_events(batch).map_err(|e| Unanswered::Malformed(e.to_string()))?;
        let admitted = self.with_registry(|registry, now| registry.admit(&speaker.caller(), events, now))?;
        let Some(ticket) = admitted.ticket.clone() else {
            return Ok(json(&EventsReply { acked_seq: admitted.from }));
        };
        let desk = self.speaking(speaker)?;
        let acked_seq = self.store_events(&desk, &admitted, &ticket).await?;
        Ok(json(&EventsReply { acked_seq }))
    }

    /// Stored first, acknowledged then: the position up to which that is so.
    pub(super) async fn store_events(
        &self,
        desk: &Desk,
        admitted: &Admitted,
        ticket: &Ticket,
    ) -> Result<u64, Unanswered> {
        let name = desk.id.to_string();
        let now = self.clock.now();
        let redact = |text: &str| desk.redacted(text);
        let written = self
            .write(desk, Some(admitted.to), |kept| {
                let lines = admitted.events.iter().filter_map(|event| told::event(kept, event, now, &redact));
                lines.collect()
            })
            .await;
        if let Err(error) = written {
            warn!(sandbox = %desk.id, %error, "what an agent tells cannot be stored");
            self.registry().abort(&name, ticket);
            return Err(Unanswered::NotNow);
        }
        let changed: Vec<String> = admitted.events.iter().filter_map(told::service_of).collect();
        // What the last heartbeat said of these is older.
        desk.pulse().health.retain(|health| !changed.contains(&health.name));
        if admitted.events.iter().any(|event| event.kind == told::SERVICE_CHANGED) {
            // Older than what was told just now; the next heartbeat has all of it again.
            desk.pulse().health.clear();
        }
        self.registry().commit(&name, ticket).ok_or(Unanswered::Refused(Refusal::Superseded))
    }

    async fn fatal(&self, speaker: &Speaker, report: &FatalReport) -> Result<Response<Body>, Unanswered> {
        let verdict = self.with_registry(|registry, _| registry.fatal(&speaker.caller()))?;
        let desk = self.speaking(speaker)?;
        // A repeated one is from an agent that did not hear the answer: what it reports is written only once.
        let known = verdict == FatalVerdict::Repeated && desk.kept().facts.failure.is_some();
        if !known {
            warn!(sandbox = %desk.id, phase = report.phase, "the agent gives its sandbox up");
            let now = self.clock.now();
            let redact = |text: &str| desk.redacted(text);
            let written = self.write(&desk, None, |kept| told::fatal(kept, report, now, &redact)).await;
            if let Err(error) = written {
                warn!(sandbox = %desk.id, %error, "a fatal report cannot be stored");
                return Err(Unanswered::NotNow);
            }
        }
        Ok(json(&serde_json::json!({})))
    }

    fn git_credential(
        &self,
        speaker: &Speaker,
        asked: &GitCredentialRequest,
    ) -> Result<Response<Body>, Unanswered> {
        let scope = self.registry().credential(&speaker.caller(), asked).cloned()?;
        let desk = self.speaking(speaker)?;
        let credential = desk.credential(&scope).ok_or(Refusal::NotDeclared)?;
        // A key opens more than its repository, and git inside never gets it: only a boot needs one. A box boots once.
        if credential.known_hosts.is_some() && desk.has_booted() {
            return Err(Refusal::BootOver.into());
        }
        info!(sandbox = %desk.id, host = scope.host(), path = scope.path(), "a credential was handed out");
        Ok(json(&credential))
    }

    /// The stream: commands as they come, comments in between, until the lease is another's.
    fn stream(
        self: &Arc<Self>,
        speaker: Speaker,
        after: Option<String>,
    ) -> Result<Response<Body>, Unanswered> {
        let desk = self.speaking(&speaker)?;
        self.with_registry(|registry, now| registry.commands(&speaker.caller(), after.as_deref(), now))?;
        let position = (self.clone(), desk, speaker, after);
        let chunks = stream::unfold(position, |(workspaces, desk, speaker, mut after)| async move {
            loop {
                let watched = desk.clone();
                let stirred = watched.stirred.notified();
                let frames = workspaces.with_registry(|registry, now| {
                    registry.commands(&speaker.caller(), after.as_deref(), now)
                });
                let frames = frames.ok()?;
                if let Some(last) = frames.last() {
                    after = Some(last.command_id.to_string());
                    let text: String = frames.iter().filter_map(|frame| sse::command(frame).ok()).collect();
                    return Some((Bytes::from(text), (workspaces, desk, speaker, after)));
                }
                tokio::select! {
                    () = stirred => {}
                    () = watched.closing.cancelled() => return None,
                    () = tokio::time::sleep(STREAM_KEEP_ALIVE) => {
                        let alive = Bytes::from_static(sse::KEEP_ALIVE.as_bytes());
                        return Some((alive, (workspaces, desk, speaker, after)));
                    }
                }
            }
        });
        let body = StreamBody::new(chunks.map(|chunk| Ok(Frame::data(chunk))));
        let mut response = Response::new(body.boxed_unsync());
        let kind = http::HeaderValue::from_static("text/event-stream");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(response)
    }
}
