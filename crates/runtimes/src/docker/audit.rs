//! What the sidecars of boxes tell: on demand as a part of a box's history, and live while the engine is listened to.
//!
//! Bounded: a history takes the newest lines only, so many sidecars are listened to at once, and what one of them tells in excess is counted
//! instead of told.

use std::{collections::HashSet, time::Duration};

use bollard::{Docker, container::LogOutput, query_parameters::LogsOptions};
use futures_util::{
    StreamExt, future,
    stream::{BoxStream, SelectAll},
};
use sandglass_sandbox::{Clock, SandboxId, SystemClock, Timestamp, ports::runtime::BoxEvent};
use sandglass_shim::EgressEvent;
use tokio::time::Instant;
use tracing::debug;

use super::{
    Shared,
    container::Container,
    enforcer,
    labels::{self, instant},
};

/// The newest lines of a sidecar that are looked at, and the newest events among them that are told.
const MOST_LINES: usize = 1000;
const MOST_EVENTS: usize = 200;
/// Longer lines are none of the enforcer's.
const LONGEST_LINE: usize = 4096;
/// Sidecars that are listened to at the same time; the events of others are in their histories all the same.
const MOST_SIDECARS: usize = 512;
/// What one sidecar may tell at once, and how often afterwards.
const BURST: u32 = 20;
const PAUSE: Duration = Duration::from_secs(1);

/// Whether a sidecar is our own enforcer, which tells events.
pub(super) fn is_own(sidecar: &Container) -> bool {
    sidecar.labels.contains_key(enforcer::LABEL)
}

impl Shared {
    /// The newest events of a sidecar, oldest first. None when they cannot be read: the rest of the history is worth telling without.
    pub(super) async fn told_by_sidecar(&self, key: &str) -> Vec<BoxEvent> {
        let options = LogsOptions {
            stdout: true,
            timestamps: true,
            tail: MOST_LINES.to_string(),
            ..LogsOptions::default()
        };
        let read = self.client.call(|docker| async move {
            let mut told = Vec::new();
            let mut lines = docker.logs(key, Some(options));
            while let Some(line) = lines.next().await {
                told.extend(event(&line?));
            }
            Ok(told)
        });
        match read.await {
            Ok(told) => told.into_iter().rev().take(MOST_EVENTS).rev().collect(),
            Err(error) => {
                debug!(container = key, error = %error, "the events of a sidecar cannot be read");
                Vec::new()
            }
        }
    }
}

/// The sidecars that are listened to. Dropped, nobody is any more.
#[derive(Default)]
pub(super) struct Listening {
    keys: HashSet<String>,
    told: SelectAll<BoxStream<'static, Told>>,
}

enum Told {
    Event(SandboxId, BoxEvent),
    /// The sidecar has ended.
    End(String),
}

impl Listening {
    /// Listens to a sidecar from then on.
    pub(super) fn begin(&mut self, docker: &Docker, id: SandboxId, key: &str, from: Timestamp) {
        if self.keys.len() >= MOST_SIDECARS || !self.keys.insert(key.to_owned()) {
            return;
        }
        let options = LogsOptions {
            follow: true,
            stdout: true,
            timestamps: true,
            since: i32::try_from(from.as_millis() / 1000).unwrap_or(0),
            ..LogsOptions::default()
        };
        let mut allowance = Allowance::full(Instant::now());
        let events = docker.logs(key, Some(options)).filter_map(move |line| {
            // The engine counts in seconds.
            let told = line.ok().as_ref().and_then(event).filter(|event| event.at >= from);
            future::ready(told.and_then(|event| allowance.take(event, Instant::now())))
        });
        let end = futures_util::stream::iter([Told::End(key.to_owned())]);
        self.told.push(events.map(move |event| Told::Event(id, event)).chain(end).boxed());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    /// The next event; `None` when a sidecar has ended, or none is left.
    pub(super) async fn next(&mut self) -> Option<(SandboxId, BoxEvent)> {
        match self.told.next().await? {
            Told::Event(id, event) => Some((id, event)),
            Told::End(key) => {
                self.keys.remove(&key);
                None
            }
        }
    }

    /// Listens to all sidecars that run.
    pub(super) fn begin_all(&mut self, docker: &Docker, sidecars: &[Container]) {
        for sidecar in sidecars.iter().filter(|sidecar| is_own(sidecar)) {
            if let Some(id) = labels::sidecar_of(&sidecar.labels) {
                self.begin(docker, id, &sidecar.key, SystemClock.now());
            }
        }
    }
}

fn event(line: &LogOutput) -> Option<BoxEvent> {
    let text = String::from_utf8_lossy(line.as_ref());
    let (time, rest) = text.split_once(' ')?;
    let told = (rest.len() <= LONGEST_LINE).then(|| EgressEvent::of_line(rest))??;
    Some(BoxEvent { at: instant(time)?, kind: told.kind.to_owned(), message: told.message })
}

/// What one sidecar may still tell.
struct Allowance {
    left: u32,
    filled: Instant,
    swallowed: u64,
}

impl Allowance {
    fn full(now: Instant) -> Self {
        Self { left: BURST, filled: now, swallowed: 0 }
    }

    /// The event with the count of those that were not told before it, or nothing.
    fn take(&mut self, mut event: BoxEvent, now: Instant) -> Option<BoxEvent> {
        let due = now.duration_since(self.filled).as_millis() / PAUSE.as_millis();
        let due = u32::try_from(due).unwrap_or(u32::MAX);
        if due > 0 {
            self.left = self.left.saturating_add(due).min(BURST);
            self.filled = now;
        }
        if self.left == 0 {
            self.swallowed += 1;
            return None;
        }
        self.left -= 1;
        if self.swallowed > 0 {
            event.message = format!("{} ({} more before it)", event.message, self.swallowed);
            self.swallowed = 0;
        }
        Some(event)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_the_log_is_an_event_at_its_time() {
        let line = |text: &str| LogOutput::StdOut { message: text.to_owned().into() };
        let denial = r#"{"event":{"kind":"denied","by":"dns","host":"a.example","rule":"default"}}"#;
        let told = event(&line(&format!("2026-01-01T00:00:01.5Z {denial}\n"))).unwrap();
        assert_eq!((told.kind.as_str(), told.at.as_millis() % 10_000), ("egress.denied", 1500));
        for other in ["2026-01-01T00:00:01Z {\"ready\":true}\n", "nonsense", "", "soon {}"] {
            assert!(event(&line(other)).is_none(), "{other}");
        }
    }

    #[test]
    fn a_flood_is_counted_and_not_told() {
        let now = Instant::now();
        let mut allowance = Allowance::full(now);
        let event =
            || BoxEvent { at: Timestamp::clamped(0), kind: "egress.denied".into(), message: "m".into() };
        let told = (0..100).filter_map(|_| allowance.take(event(), now)).count();
        assert_eq!(told, BURST as usize);
        let next = allowance.take(event(), now + PAUSE).unwrap();
        assert_eq!(next.message, "m (80 more before it)");
        assert!(allowance.take(event(), now + PAUSE).is_none());
        let after = allowance.take(event(), now + PAUSE * 100_000).unwrap();
        assert_eq!((after.message.as_str(), allowance.left), ("m (1 more before it)", BURST - 1));
    }
}
