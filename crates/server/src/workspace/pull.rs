//! The channel to an agent that cannot call: the server asks it, over the agent's own API.
//!
//! Owns one task a sandbox, from when its box is made until it is gone. What it brings counts as what agents send: an answer is a heartbeat,
//! no answer is silence, and events are acknowledged when they are stored. Does not own whether the agent is alive (the registry does), and
//! hands out no credentials: there is nobody to ask for them.
//!
//! Invariant: there is at most one task a sandbox, and what it asks for it asks again after a restart, from where the store is.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use reqwest::{Method, Url};
use sandglass_bridge::{
    pull::{PullPage, PullStatus},
    wire::{BootId, Command, CommandFrame, Event, LogBytes, LogFrame, Outcome, Refusal},
};
use sandglass_sandbox::{SandboxId, ports::runtime::Condition, workspace::Way};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::json;
use tracing::{info, warn};

use super::{
    Workspaces,
    answer::Unanswered,
    calls::signs,
    desk::{Desk, Pulse},
};
use crate::builds::inside::{Door, TOKEN_HEADER};

/// Between two rounds while something is expected: a boot, or an end.
const SOON: Duration = Duration::from_millis(500);
/// An agent answers in milliseconds.
const PATIENCE: Duration = Duration::from_secs(5);
/// The longest answer that is taken.
const MOST: usize = 2 << 20;
/// What an agent is told that asks for what needs a call of its own.
const UNSUPPORTED: &str = "COMMAND::UNSUPPORTED";

/// Why a round was cut off.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
enum NotAsked {
    #[error("the agent cannot be reached from here")]
    NoWay,
    #[error("the agent does not answer: {0}")]
    Silent(String),
    #[error("the agent refused with {status}: {text}")]
    Refused { status: u16, text: String },
    #[error("the agent's answer is not understood: {0}")]
    Strange(String),
    #[error("its channel does not take it: {0:?}")]
    NotTaken(Unanswered),
}

impl From<Refusal> for NotAsked {
    fn from(refusal: Refusal) -> Self {
        Self::NotTaken(refusal.into())
    }
}

/// What is known between rounds.
#[derive(Default)]
struct Rounds {
    /// Up to where output was taken, by source.
    read: HashMap<String, u64>,
    /// What was last wrong, so that it is told once.
    trouble: Option<NotAsked>,
}

/// The agents' API, as far as it is asked.
pub(super) struct Asking(reqwest::Client);

#[derive(Deserialize)]
struct Sources {
    items: Vec<Source>,
}

#[derive(Deserialize)]
struct Source {
    source: String,
    end: u64,
}

#[derive(Deserialize)]
struct Failed {
    #[serde(default)]
    code: String,
    #[serde(default)]
    message: String,
}

impl Asking {
    /// # Errors
    /// When there can be no HTTP client.
    pub(super) fn new() -> Result<Self, reqwest::Error> {
        crate::tls::use_ring();
        let client = reqwest::Client::builder().no_proxy().connect_timeout(PATIENCE).timeout(PATIENCE);
        Ok(Self(client.redirect(reqwest::redirect::Policy::none()).build()?))
    }

    async fn call(
        &self,
        door: &Door,
        method: Method,
        path: &[&str],
        query: &[(&str, String)],
        body: Option<serde_json::Value>,
    ) -> Result<Answer, NotAsked> {
        let url = url(door, path, query).ok_or(NotAsked::NoWay)?;
        let mut request = self.0.request(method, url).header(TOKEN_HEADER, &door.token);
        if let Some(body) = body {
            request = request.header("content-type", "application/json").body(body.to_string());
        }
        let silent = |e: reqwest::Error| NotAsked::Silent(e.without_url().to_string());
        let mut answer = request.send().await.map_err(silent)?;
        let number = |name: &str| -> Option<u64> { answer.headers().get(name)?.to_str().ok()?.parse().ok() };
        let offsets = number("x-log-offset").zip(number("x-log-next"));
        let status = answer.status();
        let mut bytes = Vec::new();
        while let Some(chunk) = answer.chunk().await.map_err(silent)? {
            if bytes.len() + chunk.len() > MOST {
                return Err(NotAsked::Strange(format!("it is longer than {MOST} bytes")));
            }
            bytes.extend_from_slice(&chunk);
        }
        if status.is_success() {
            return Ok(Answer { bytes, offsets });
        }
        let text = String::from_utf8_lossy(&bytes).chars().take(500).collect();
        Err(NotAsked::Refused { status: status.as_u16(), text })
    }

    async fn get<T: DeserializeOwned>(
        &self,
        door: &Door,
        path: &[&str],
        query: &[(&str, String)],
    ) -> Result<T, NotAsked> {
        let answer = self.call(door, Method::GET, path, query, None).await?;
        serde_json::from_slice(&answer.bytes).map_err(|e| NotAsked::Strange(e.to_string()))
    }

    /// Does what the agent's API has, in the stead of an agent that hears of commands.
    async fn carry_out(&self, door: &Door, frame: &CommandFrame) -> Outcome {
        let command = match frame.command() {
            Ok(command) => command,
            Err(error) => return Outcome::failed(UNSUPPORTED, error.to_string()),
        };
        let (method, path, body): (_, Vec<&str>, _) = match &command {
            Command::ServiceStart { name } => (Method::POST, vec!["services", name, "start"], None),
            Command::ServiceRestart { name } => (Method::POST, vec!["services", name, "restart"], None),
            Command::ServiceStop { name } => {
                (Method::PUT, vec!["services", name], Some(json!({"enabled": false})))
            }
            Command::Ping | Command::SnapshotThaw | Command::ExpirationChanged { .. } => {
                return Outcome::done();
            }
            other => {
                let message = format!("an agent that is asked cannot be told {}", other.kind());
                return Outcome::failed(UNSUPPORTED, message);
            }
        };
        match self.call(door, method, &path, &[], body).await {
            Ok(_) => Outcome::done(),
            Err(NotAsked::Refused { text, .. }) => match serde_json::from_str::<Failed>(&text) {
                Ok(failed) => Outcome::failed(&failed.code, failed.message),
                Err(_) => Outcome::failed("AGENT::REFUSED", text),
            },
            Err(error) => Outcome::failed("AGENT::NO_ANSWER", error.to_string()),
        }
    }
}

struct Answer {
    bytes: Vec<u8>,
    /// Of output: where it begins, and where to read on.
    offsets: Option<(u64, u64)>,
}

fn url(door: &Door, path: &[&str], query: &[(&str, String)]) -> Option<Url> {
    let mut url = Url::parse(&format!("http://{}", door.address)).ok()?;
    url.path_segments_mut().ok()?.extend(["v1", "workspace"]).extend(path);
    if !query.is_empty() {
        url.query_pairs_mut().extend_pairs(query);
    }
    Some(url)
}

impl Workspaces {
    /// Asks the agent of a sandbox from now on, if that is how its box was told that the two meet.
    pub(super) fn ask(self: &Arc<Self>, id: SandboxId) {
        let Some(desk) = self.desk(id) else { return };
        match self.folders.way(id) {
            Ok(Some(Way::Pull)) => {}
            Ok(_) => return,
            Err(error) => {
                warn!(sandbox = %id, %error, "how its agent is reached cannot be read");
                return;
            }
        }
        if desk.asked.swap(true, Ordering::SeqCst) {
            return;
        }
        let asking = match Asking::new() {
            Ok(asking) => asking,
            Err(error) => {
                warn!(sandbox = %id, %error, "its agent cannot be asked");
                return;
            }
        };
        info!(sandbox = %id, "the agent is asked: it cannot call");
        let this = self.clone();
        self.tasks.spawn(async move { this.keep_asking(&desk, &asking).await });
    }

    async fn keep_asking(&self, desk: &Desk, asking: &Asking) {
        let mut rounds = Rounds::default();
        loop {
            let stirred = desk.stirred.notified();
            tokio::pin!(stirred);
            // What comes during a round is for the next one.
            stirred.as_mut().enable();
            let trouble = self.round(desk, asking, &mut rounds).await.err();
            if trouble != rounds.trouble {
                match &trouble {
                    Some(error) => warn!(sandbox = %desk.id, %error, "a round of questions was cut off"),
                    None => info!(sandbox = %desk.id, "the agent answers again"),
                }
                rounds.trouble = trouble;
            }
            if rounds.trouble == Some(NotAsked::NotTaken(Unanswered::Refused(Refusal::Gone))) {
                // It was given up, or what answers is another box than the one that ends.
                return;
            }
            tokio::select! {
                () = tokio::time::sleep(self.pause_between(desk)) => {}
                () = stirred => {}
                () = desk.closing.cancelled() => return,
                () = self.stopping.cancelled() => return,
            }
        }
    }

    /// The pace of heartbeats, and faster where somebody waits for what comes next.
    fn pause_between(&self, desk: &Desk) -> Duration {
        let entry = self.engine().and_then(|engine| engine.index().get(desk.id));
        let source = entry.as_ref().and_then(|entry| entry.spec()?.source.as_ref());
        let pace = source.map_or(SOON, |source| Duration::from_secs(source.lease.heartbeat_interval_seconds));
        let wanted = entry.as_ref().is_some_and(|entry| {
            // What is frozen owes a sign of life as soon as it runs again.
            let runs = |condition: &Condition| *condition == Condition::Running;
            entry.intent.is_some() || !entry.observed.as_ref().is_some_and(|seen| runs(&seen.condition))
        });
        if wanted || desk.kept().facts.ready_at.is_none() { pace.min(SOON) } else { pace }
    }

    /// A sign of life, what happened, what was written, and what is to be done.
    async fn round(&self, desk: &Desk, asking: &Asking, rounds: &mut Rounds) -> Result<(), NotAsked> {
        let Some(engine) = self.engine() else { return Ok(()) };
        let observed = engine.index().get(desk.id).and_then(|entry| entry.observed);
        let Some(observed) = observed.filter(|observed| observed.condition == Condition::Running) else {
            return Ok(());
        };
        let door = engine.door(&observed).ok_or(NotAsked::NoWay)?;
        let name = desk.id.to_string();
        let status: PullStatus = asking.get(&door, &["bridge", "status"], &[]).await?;
        let version = status.agent_version.chars().take(64).collect();
        desk.note(|kept| kept.agent_version = Some(version));
        let position = self.with_registry(|registry, now| registry.polled(&name, &status.boot_id, now))?;
        self.sooner.notify_one();
        engine.heard(desk.id, signs(&status.activity));
        *desk.pulse() = Pulse {
            heartbeat_at: Some(self.clock.now()),
            activity: status.activity,
            load: status.load,
            health: status.services,
        };
        if status.last_seq > position || status.acked_seq < position {
            self.take_events(desk, (asking, &door), &status.boot_id, position).await?;
        }
        self.take_output(desk, (asking, &door), &status.boot_id, rounds).await?;
        let frames = self.with_registry(|registry, now| registry.commands_polled(&name, now))?;
        for frame in frames {
            let outcome = asking.carry_out(&door, &frame).await;
            let id = frame.command_id.as_str();
            if self.with_registry(|registry, _| registry.settle_polled(&name, id))? {
                self.commands.settle(id, outcome);
            }
        }
        Ok(())
    }

    /// Page by page; the question for the next one says that those before are stored.
    async fn take_events(
        &self,
        desk: &Desk,
        (asking, door): (&Asking, &Door),
        boot: &BootId,
        mut position: u64,
    ) -> Result<(), NotAsked> {
        loop {
            let query = [
                ("boot", boot.as_str().to_owned()),
                ("after", position.to_string()),
                ("ack", position.to_string()),
            ];
            let page: PullPage = asking.get(door, &["bridge", "events"], &query).await?;
            if page.boot_id != *boot || page.events.is_empty() {
                // Another boot presents itself with its next sign of life.
                return Ok(());
            }
            let events: Result<Vec<Event>, _> =
                page.events.iter().map(|raw| serde_json::from_str(raw.get())).collect();
            let events = events.map_err(|e| NotAsked::Strange(e.to_string()))?;
            let name = desk.id.to_string();
            let admitted =
                self.with_registry(|registry, now| registry.admit_polled(&name, boot, events, now))?;
            let Some(ticket) = admitted.ticket.clone() else { return Ok(()) };
            position = self.store_events(desk, &admitted, &ticket).await.map_err(NotAsked::NotTaken)?;
        }
    }

    async fn take_output(
        &self,
        desk: &Desk,
        (asking, door): (&Asking, &Door),
        boot: &BootId,
        rounds: &mut Rounds,
    ) -> Result<(), NotAsked> {
        let sources: Sources = asking.get(door, &["logs"], &[]).await?;
        for Source { source, end } in sources.items {
            let from = rounds.read.get(&source).copied().unwrap_or(0);
            if end <= from {
                continue;
            }
            let query = [("from", from.to_string())];
            let answer = asking.call(door, Method::GET, &["logs", &source], &query, None).await?;
            let (offset, next) =
                answer.offsets.ok_or_else(|| NotAsked::Strange("the output has no place".into()))?;
            let frame = LogFrame {
                source: source.clone(),
                stream: "output".into(),
                offset,
                data: LogBytes(answer.bytes),
            };
            let mut frames = vec![frame];
            if self.pass_over(desk, &mut frames).is_none() {
                // It is not known yet what the sandbox is.
                return Ok(());
            }
            let name = desk.id.to_string();
            let batch = self.with_registry(|registry, _| registry.logs_polled(&name, boot, frames))?;
            let batch = batch.map_err(|e| NotAsked::Strange(e.to_string()))?;
            self.keep_output(desk, batch.pieces).await;
            rounds.read.insert(source, next);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_lead_elsewhere() {
        let door = Door { address: ([127, 0, 0, 1], 9).into(), token: "t".into() };
        let url = url(&door, &["logs", "boot.setup.a/../b?c"], &[("from", "1".into())]).unwrap();
        assert_eq!(url.as_str(), "http://127.0.0.1:9/v1/workspace/logs/boot.setup.a%2F..%2Fb%3Fc?from=1");
    }
}
