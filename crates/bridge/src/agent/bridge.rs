//! The state machine at work: one task that makes the calls, reads the stream and wakes up when it must.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use futures_util::stream::{FuturesUnordered, StreamExt};
use http::Method;
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

use crate::moment::{Moment, Monotonic};
use crate::ring::Ring;
use crate::wire::limits::PROTOCOL_VERSION;
use crate::wire::{
    Activity, AttachReply, AttachRequest, Command, CommandFrame, CommandId, EventsReply, GitCredential,
    GitCredentialRequest, Heartbeat, LeaseId, Load, LogsReply, Outcome, Refusal, ServiceHealth, paths,
};

use super::action::{Action, Call, Ending, Identity, Notice, Pace};
use super::backoff::Jitter;
use super::core::Core;
use super::handle::{CredentialError, Handle, Shared, Wish};
use super::lane::{Failure, Lane};
use super::stream::{StreamNews, StreamRun, failure_of, news};
use super::transport::{Answer, Request, Transport, TransportError};

/// What a bridge is made of.
#[derive(Debug, Clone)]
pub struct Config {
    pub identity: Identity,
    pub pace: Pace,
    pub jitter: Jitter,
}

/// What a heartbeat tells. Read in the bridge's task: must not block.
pub trait Vitals: Send + Sync + 'static {
    fn read(&self) -> VitalSigns;
}

#[derive(Debug, Clone, PartialEq, Default)]
pub struct VitalSigns {
    pub activity: Activity,
    pub services: Vec<ServiceHealth>,
    pub load: Load,
}

/// A command to carry out and then [settle](Handle::settle).
#[derive(Debug, Clone, PartialEq)]
pub struct Delivered {
    pub id: CommandId,
    pub command: Command,
    /// When the server stops waiting.
    pub expires: Option<Instant>,
}

/// A running bridge.
pub struct Bridge {
    pub handle: Handle,
    /// Commands, each once.
    pub commands: mpsc::UnboundedReceiver<Delivered>,
    pub notices: mpsc::UnboundedReceiver<Notice>,
    /// Ends with the bridge. Aborting it is safe at any time.
    pub task: JoinHandle<Ending>,
}

impl Bridge {
    /// Starts a bridge that delivers what `ring` holds and what comes after. The ring must be of the identity's boot.
    pub fn start(config: Config, transport: impl Transport, ring: Ring, vitals: impl Vitals) -> Self {
        let shared = Arc::new(Shared::new(ring));
        let (wishes, wished) = mpsc::unbounded_channel();
        let (deliver, commands) = mpsc::unbounded_channel();
        let (tell, notices) = mpsc::unbounded_channel();
        let driver = Driver {
            identity: config.identity,
            core: Core::new(config.pace, config.jitter),
            clock: Monotonic::start(),
            transport,
            vitals,
            shared: shared.clone(),
            calls: FuturesUnordered::new(),
            stream: None,
            deliver,
            tell,
        };
        Self { handle: Handle { shared, wishes }, commands, notices, task: tokio::spawn(driver.run(wished)) }
    }
}

struct Driver<T, V> {
    identity: Identity,
    core: Core,
    clock: Monotonic,
    transport: T,
    vitals: V,
    shared: Arc<Shared>,
    calls: FuturesUnordered<BoxFuture<'static, Done>>,
    stream: Option<StreamRun>,
    deliver: mpsc::UnboundedSender<Delivered>,
    tell: mpsc::UnboundedSender<Notice>,
}

enum Done {
    Call(Call, Result<Answer, TransportError>),
    /// The asker has its answer.
    Credential,
}

impl<T: Transport, V: Vitals> Driver<T, V> {
    async fn run(mut self, mut wishes: mpsc::UnboundedReceiver<Wish>) -> Ending {
        self.look_for_work();
        loop {
            while let Some(action) = self.core.poll(self.clock.now()) {
                if let Some(ending) = self.perform(action) {
                    return ending;
                }
            }
            let wake = self.core.next_wake().map(|moment| self.clock.instant(moment));
            let shared = self.shared.clone();
            tokio::select! {
                Some(done) = self.calls.next() => {
                    if let Done::Call(call, result) = done {
                        self.answered(call, result);
                    }
                }
                news = news(&mut self.stream) => self.stream_news(news),
                Some(wish) = wishes.recv() => self.grant(wish),
                () = shared.wake.notified() => self.look_for_work(),
                () = sleep_until(wake.unwrap_or_else(Instant::now)), if wake.is_some() => {}
            }
        }
    }

    fn look_for_work(&mut self) {
        let now = self.clock.now();
        if self.shared.ring().has_unacked() {
            self.core.events_pending(now);
        }
        if !self.shared.logs().is_empty() {
            self.core.logs_pending(now);
        }
    }

    fn perform(&mut self, action: Action) -> Option<Ending> {
        match action {
            Action::Call(call) => self.start(call),
            Action::CloseStream => self.stream = None,
            Action::Deliver { id, command, expires } => {
                let expires = expires.map(|moment| self.clock.instant(moment));
                if self.deliver.send(Delivered { id: id.clone(), command, expires }).is_err() {
                    self.core
                        .settle(id, Outcome::failed("COMMAND::UNSUPPORTED", "nobody here takes commands"));
                }
            }
            Action::Tell(notice) => {
                let ending = if let Notice::Ended(ending) = notice { Some(ending) } else { None };
                if matches!(notice, Notice::Rejected { lane: Lane::Logs, .. }) {
                    self.shared.logs().discard_batch();
                }
                // Nobody has to listen.
                let _ = self.tell.send(notice);
                return ending;
            }
        }
        None
    }

    fn start(&mut self, call: Call) {
        let request = match &call {
            Call::Stream { lease, last_event_id } => {
                let request = Request {
                    method: Method::GET,
                    path: paths::STREAM.to_owned(),
                    lease: Some(lease.clone()),
                    last_event_id: last_event_id.clone(),
                    body: Bytes::new(),
                };
                let transport = self.transport.clone();
                let opening = Box::pin(async move { transport.open(request).await });
                self.stream = Some(StreamRun::opening(call, opening));
                return;
            }
            Call::Attach => post(paths::ATTACH, None, &self.attachment()),
            Call::Heartbeat { lease } => post(paths::HEARTBEAT, Some(lease), &self.heartbeat(lease)),
            Call::Events { lease } => {
                let batch = {
                    let mut ring = self.shared.ring();
                    let acked = ring.status().acked_seq;
                    ring.batch(acked)
                };
                let Some(batch) = batch else { return self.core.events_answered(false, self.clock.now()) };
                Ok(post_bytes(paths::EVENTS, Some(lease), batch.body))
            }
            Call::Logs { lease } => {
                let batch = self.shared.logs().batch();
                if batch.frames.is_empty() {
                    return self.core.logs_answered(false, self.clock.now());
                }
                post(paths::LOGS, Some(lease), &batch)
            }
            Call::Result { lease, command, outcome } => {
                post(&paths::command_result(command), Some(lease), outcome)
            }
            Call::Fatal(report) => post(paths::FATAL, None, report),
        };
        let Ok(request) = request else {
            return self.core.failed(&call, Failure::Useless, self.clock.now());
        };
        let transport = self.transport.clone();
        self.calls.push(Box::pin(async move {
            let result = transport.call(request).await;
            Done::Call(call, result)
        }));
    }

    fn attachment(&self) -> AttachRequest {
        let identity = &self.identity;
        AttachRequest {
            sandbox_id: identity.sandbox.clone(),
            generation: identity.generation,
            boot_id: identity.boot.clone(),
            agent_version: identity.agent_version.clone(),
            protocol_version: PROTOCOL_VERSION,
            capabilities: identity.capabilities.clone(),
            last_seq: self.shared.ring().status().last_seq,
        }
    }

    fn heartbeat(&self, lease: &LeaseId) -> Heartbeat {
        let VitalSigns { activity, services, load } = self.vitals.read();
        Heartbeat { lease_id: lease.clone(), activity, services, load }
    }

    fn answered(&mut self, call: Call, result: Result<Answer, TransportError>) {
        let now = self.clock.now();
        let answer = match result {
            Ok(answer) if (200..300).contains(&answer.status) => answer,
            Ok(answer) => return self.core.failed(&call, failure_of(&answer), now),
            Err(_) => return self.core.failed(&call, Failure::Link, now),
        };
        if self.take(&call, &answer, now).is_none() {
            self.core.failed(&call, Failure::Useless, now);
        }
    }

    /// Takes a good answer; `None` if it is not what such a call gets.
    fn take(&mut self, call: &Call, answer: &Answer, now: Moment) -> Option<()> {
        match call {
            Call::Attach => {
                let reply: AttachReply = read(answer)?;
                self.shared.ring().reconcile(reply.acked_seq);
                self.core.attached(reply, now);
                self.look_for_work();
            }
            Call::Heartbeat { lease } => self.core.heartbeat_answered(lease, &read(answer)?),
            Call::Events { .. } => {
                let EventsReply { acked_seq } = read(answer)?;
                let more = {
                    let mut ring = self.shared.ring();
                    let before = ring.status().acked_seq;
                    ring.ack(acked_seq);
                    // A batch that moved nothing would be sent again at once, for ever.
                    (ring.status().acked_seq > before).then(|| ring.has_unacked())?
                };
                self.core.events_answered(more, now);
            }
            Call::Logs { .. } => {
                let LogsReply { acked } = read(answer)?;
                let more = {
                    let mut logs = self.shared.logs();
                    logs.ack(&acked).then(|| !logs.is_empty())?
                };
                self.core.logs_answered(more, now);
            }
            Call::Result { command, .. } => self.core.result_answered(command),
            Call::Fatal(_) => self.core.fatal_answered(),
            Call::Stream { .. } => return None,
        }
        Some(())
    }

    fn stream_news(&mut self, news: StreamNews) {
        let now = self.clock.now();
        match news {
            StreamNews::Events(events) => {
                self.core.stream_alive();
                for event in events {
                    // What is no command is something that a newer server says.
                    if let Ok(frame) = serde_json::from_str::<CommandFrame>(&event.data) {
                        self.core.command_arrived(&frame, now);
                    }
                }
            }
            StreamNews::Over(failure) => {
                if let Some(run) = self.stream.take() {
                    self.core.stream_ended(&run.call, failure, now);
                }
            }
        }
    }

    fn grant(&mut self, wish: Wish) {
        match wish {
            Wish::Settle(command, outcome) => self.core.settle(command, outcome),
            Wish::Fatal(report) => self.core.fatal(report),
            Wish::Drain => {
                self.look_for_work();
                self.core.drain();
            }
            Wish::Credential(request, answer) => self.ask_for_credential(&request, answer),
        }
    }

    fn ask_for_credential(
        &mut self,
        request: &GitCredentialRequest,
        answer: oneshot::Sender<Result<GitCredential, CredentialError>>,
    ) {
        let Some(lease) = self.core.lease() else {
            let _ = answer.send(Err(CredentialError::Refused(Refusal::NotAttached)));
            return;
        };
        let request = match post(paths::GIT_CREDENTIAL, Some(lease), request) {
            Ok(request) => request,
            Err(error) => {
                let _ = answer.send(Err(CredentialError::Malformed(error)));
                return;
            }
        };
        let transport = self.transport.clone();
        self.calls.push(Box::pin(async move {
            let result = match transport.call(request).await {
                Ok(reply) if reply.status == 200 => {
                    serde_json::from_slice(&reply.body).map_err(CredentialError::Malformed)
                }
                Ok(reply) => Err(Refusal::of_answer(reply.status, &reply.body)
                    .map_or(CredentialError::Status(reply.status), CredentialError::Refused)),
                Err(error) => Err(CredentialError::Transport(error)),
            };
            // Whoever asked may have gone.
            let _ = answer.send(result);
            Done::Credential
        }));
    }
}

fn read<T: serde::de::DeserializeOwned>(answer: &Answer) -> Option<T> {
    serde_json::from_slice(&answer.body).ok()
}

fn post(path: &str, lease: Option<&LeaseId>, body: &impl Serialize) -> serde_json::Result<Request> {
    Ok(post_bytes(path, lease, serde_json::to_vec(body)?))
}

fn post_bytes(path: &str, lease: Option<&LeaseId>, body: Vec<u8>) -> Request {
    Request {
        method: Method::POST,
        path: path.to_owned(),
        lease: lease.cloned(),
        last_event_id: None,
        body: body.into(),
    }
}
