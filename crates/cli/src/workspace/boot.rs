//! Waiting until a sandbox that is made from a repository is of use, and telling meanwhile what it does.
//!
//! Three sources are read side by side: looks at the sandbox decide, its events say more, and the build's log is shown while it is waited for.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde_json::Value;
use tokio::time::{Instant as Moment, sleep, sleep_until};

use super::{addresses::services, build::BuildLog, journal::Journal, progress::Progress};
use crate::{
    client::{Client, ClientError, Sandbox},
    interrupts::{Interrupt, Interrupts},
    sse::{EventStream, Frame},
};

/// Between two looks.
const SHORTEST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// How long what was told already may take to come.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long services may start before they are told of as they are.
const SETTLING: Duration = Duration::from_secs(15);
/// How long a server may be away; one that starts again goes on with what was under way.
const AWAY: Duration = Duration::from_secs(60);

/// How the waiting ended.
#[derive(Debug)]
pub enum Outcome {
    /// It runs, perhaps without all its services.
    Ready(Box<Sandbox>),
    /// It never will.
    Failed(Box<Sandbox>),
    Interrupted(Interrupt),
}

/// Waits for a sandbox that was just created.
///
/// # Errors
/// When the server cannot be asked, or the sandbox was removed meanwhile.
pub async fn follow(
    client: &Client,
    sandbox: Sandbox,
    progress: &Progress,
    interrupts: &mut Interrupts,
) -> Result<Outcome> {
    let mut boot = Boot::new(client, sandbox);
    loop {
        boot.show(progress);
        if let Some(outcome) = boot.outcome() {
            boot.rest(progress).await;
            return Ok(outcome);
        }
        let next_look = boot.next_look;
        tokio::select! {
            // A look comes last, so that what led to the end is told before it.
            biased;
            interrupt = interrupts.next() => return Ok(Outcome::Interrupted(interrupt)),
            heard = boot.hear() => boot.take(heard, progress),
            () = sleep_until(next_look) => boot.look().await?,
        }
    }
}

/// What one of the streams brought.
enum Heard {
    Event(Frame),
    Log(Vec<String>),
    EventsOver,
    LogOver,
}

struct Boot {
    client: Client,
    sandbox: Sandbox,
    journal: Journal,
    events: Option<EventStream>,
    log: Option<BuildLog>,
    /// The build whose log is shown, or was.
    build: String,
    pause: Duration,
    next_look: Moment,
    away: Option<Instant>,
    lines: Vec<String>,
}

impl Boot {
    fn new(client: &Client, sandbox: Sandbox) -> Self {
        // From the beginning, so that nothing is missed between the create and the first read.
        let query = vec![("after", "0".to_owned())];
        let events = EventStream::open(client, &["sandboxes", sandbox.id(), "events"], query);
        let mut boot = Self {
            client: client.clone(),
            journal: Journal::new(Instant::now()),
            sandbox,
            events: Some(events),
            log: None,
            build: String::new(),
            pause: SHORTEST_PAUSE,
            next_look: Moment::now() + SHORTEST_PAUSE,
            away: None,
            lines: Vec::new(),
        };
        boot.seen();
        boot
    }

    fn outcome(&self) -> Option<Outcome> {
        let sandbox = Box::new(self.sandbox.clone());
        match self.sandbox.state() {
            "Pending" => None,
            "Running" => Some(Outcome::Ready(sandbox)),
            _ => Some(Outcome::Failed(sandbox)),
        }
    }

    fn show(&mut self, progress: &Progress) {
        for line in self.lines.drain(..) {
            progress.line(&line);
        }
        progress.doing(&self.journal.doing(&self.sandbox, Instant::now()));
    }

    /// The next thing that a stream brings. Safe to cancel.
    async fn hear(&mut self) -> Heard {
        let Self { events, log, .. } = self;
        let events = async {
            match events {
                // A server that refuses them still answers looks.
                Some(events) => events.next().await.ok().flatten(),
                None => std::future::pending().await,
            }
        };
        let log = async {
            match log {
                Some(log) => log.next().await.ok().flatten(),
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            lines = log => lines.map_or(Heard::LogOver, Heard::Log),
            frame = events => frame.map_or(Heard::EventsOver, Heard::Event),
        }
    }

    fn take(&mut self, heard: Heard, progress: &Progress) {
        match heard {
            Heard::Log(lines) => lines.iter().for_each(|line| progress.line(line)),
            Heard::LogOver => self.log = None,
            Heard::EventsOver => self.events = None,
            Heard::Event(frame) => {
                self.event(&frame);
                // Something happened: it is looked at soon.
                self.pause = SHORTEST_PAUSE;
                self.next_look = self.next_look.min(Moment::now() + SHORTEST_PAUSE);
            }
        }
    }

    fn event(&mut self, frame: &Frame) {
        let event: Value = serde_json::from_str(&frame.data).unwrap_or_default();
        let data = event.get("data").unwrap_or(&Value::Null);
        if frame.event == "image.resolved"
            && let Some(log) = &self.log
        {
            log.hurry();
        }
        self.lines.extend(self.journal.event(&frame.event, data, Instant::now()));
    }

    async fn look(&mut self) -> Result<()> {
        let answer = self.client.get(self.sandbox.id()).await;
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
        self.next_look = Moment::now() + self.pause;
        let error = match answer {
            Ok(sandbox) => {
                self.away = None;
                self.sandbox = sandbox;
                self.seen();
                return Ok(());
            }
            Err(error) => error,
        };
        match error.downcast_ref::<ClientError>() {
            Some(ClientError::Refused(refusal)) if refusal.status.as_u16() == 404 => {
                bail!("the sandbox {} was removed before it was ready", self.sandbox.id())
            }
            Some(ClientError::Unreachable { .. } | ClientError::Interrupted { .. })
                if self.away.get_or_insert_with(Instant::now).elapsed() < AWAY =>
            {
                Ok(())
            }
            _ => Err(error.context(format!("waiting for the sandbox {}, which goes on", self.sandbox.id()))),
        }
    }

    fn seen(&mut self) {
        self.lines.extend(self.journal.look(&self.sandbox, Instant::now()));
        let build =
            self.sandbox.0.pointer("/source/imageBuildId").and_then(Value::as_str).unwrap_or_default();
        let waits = matches!(self.sandbox.reason(), "image_build_queued" | "image_building");
        if waits && build != self.build {
            build.clone_into(&mut self.build);
            self.log = Some(BuildLog::follow(&self.client, build));
        }
    }

    /// The end of the log and of the events, which may come a moment after what they led to.
    async fn rest(&mut self, progress: &Progress) {
        if let Some(log) = &self.log {
            log.hurry();
        }
        let end = sleep(LAST_WORDS);
        tokio::pin!(end);
        while self.log.is_some() || (self.events.is_some() && !self.journal.is_complete(&self.sandbox)) {
            let heard = tokio::select! {
                heard = self.hear() => heard,
                () = &mut end => break,
            };
            self.take(heard, progress);
            self.show(progress);
        }
    }
}

/// Waits a while until the services of a sandbox that runs are what they will be: one that is not needed for it to be ready may still start.
///
/// # Errors
/// When the server cannot be asked.
pub async fn settled(client: &Client, mut sandbox: Sandbox) -> Result<Sandbox> {
    let end = Moment::now() + SETTLING;
    let mut pause = SHORTEST_PAUSE;
    while is_settling(&sandbox) && Moment::now() < end {
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
        sandbox = client.get(sandbox.id()).await?;
    }
    Ok(sandbox)
}

fn is_settling(sandbox: &Sandbox) -> bool {
    sandbox.state() == "Running" && services(sandbox).iter().any(|service| service.state() == "Starting")
}

/// Why a sandbox is of no use, with the end of what was printed last.
pub fn failure(sandbox: &Sandbox) -> (String, Vec<String>) {
    let text = |pointer: &str| sandbox.0.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let number = |pointer: &str| sandbox.0.pointer(pointer).and_then(Value::as_i64);
    let message = match (text("/lastFailure/message"), sandbox.message()) {
        ("", "") => sandbox.state(),
        ("", message) | (message, _) => message,
    };
    let mut facts: Vec<String> = Vec::new();
    match (text("/lastFailure/reason"), sandbox.reason()) {
        ("", "") => {}
        ("", reason) | (reason, _) => facts.push(reason.to_owned()),
    }
    if !text("/lastFailure/phase").is_empty() {
        facts.push(format!("phase {}", text("/lastFailure/phase")));
    }
    for (name, pointer) in [("exit code", "/lastFailure/exitCode"), ("signal", "/lastFailure/signal")] {
        facts.extend(number(pointer).map(|number| format!("{name} {number}")));
    }
    let told =
        if facts.is_empty() { message.to_owned() } else { format!("{message} ({})", facts.join(", ")) };
    (told, text("/lastFailure/outputTail").lines().map(super::build::readable).collect())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_what_starts_is_waited_for() {
        let with = |state: &str| {
            Sandbox(
                json!({ "status": { "state": "Running" }, "services": [{ "name": "ssh", "state": state }] }),
            )
        };
        assert!(is_settling(&with("Starting")));
        assert!(["Ready", "Failed", "Disabled", "Restarting"].iter().all(|state| !is_settling(&with(state))));
    }

    #[test]
    fn a_failure_names_phase_exit_code_and_last_words() {
        let sandbox = Sandbox(json!({
            "id": "i", "status": { "state": "Failed", "reason": "boot_failed", "message": "the setup failed" },
            "lastFailure": { "reason": "boot_failed", "phase": "setup", "exitCode": 3, "message": "`npm ci` failed",
                             "outputTail": "one\n\u{1b}[31mtwo\u{1b}[0m\n" },
        }));
        let (why, tail) = failure(&sandbox);
        assert_eq!(why, "`npm ci` failed (boot_failed, phase setup, exit code 3)");
        assert_eq!(tail, ["one", "two"]);
        let bare = Sandbox(json!({ "id": "i", "status": { "state": "Terminated" } }));
        assert_eq!(failure(&bare), ("Terminated".to_owned(), vec![]));
    }
}
