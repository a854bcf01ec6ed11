//! Writes events to standard output: repeated ones once with their number, and no more than a bounded rate.
//!
//! Invariant: telling never waits. Whoever reads standard output may be slow or gone; what does not fit is counted.

use std::collections::HashMap;
use std::io::Write;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::limit::Budget;
use super::webhook::Denials;
use super::{Audit, Event, Gate};
use crate::policy::always::Always;

/// The same event within this time is counted, not told.
const WINDOW: Duration = Duration::from_secs(10);

/// Different events that are remembered within a window; beyond them only the rate limits.
const MOST_REMEMBERED: usize = 512;

const EVENTS_AT_ONCE: u32 = 64;
const EVENTS_PER_SECOND: u32 = 10;

/// Longer events are not told: names and rules are shorter, and what is remembered is bounded.
const LONGEST: usize = 4096;

/// Lines that wait for the reader.
const LINES_WAITING: usize = 256;

/// The one place where events leave the process.
pub struct Output {
    lines: SyncSender<String>,
    told: Mutex<Told>,
    quiet: Mutex<Arc<Always>>,
    denials: Option<Denials>,
}

struct Told {
    recent: HashMap<String, Recent>,
    budget: Budget,
    /// Events that were neither told nor counted with an equal one.
    lost: u64,
}

struct Recent {
    since: Instant,
    repeated: u64,
}

#[derive(Serialize)]
struct Line<'a> {
    event: &'a Event,
}

impl Output {
    /// Starts the writer. The denials go to the webhook as well, if there is one.
    pub fn start(denials: Option<Denials>) -> std::io::Result<Self> {
        let (lines, waiting) = sync_channel(LINES_WAITING);
        std::thread::Builder::new().name("output".into()).spawn(move || write(&waiting))?;
        Ok(Self::new(lines, denials))
    }

    fn new(lines: SyncSender<String>, denials: Option<Denials>) -> Self {
        let budget = Budget::new(EVENTS_AT_ONCE, EVENTS_PER_SECOND);
        let told = Told { recent: HashMap::new(), budget, lost: 0 };
        Self { lines, told: Mutex::new(told), quiet: Mutex::default(), denials }
    }

    /// Denials of the names in `log_skip` are not told from now on.
    pub fn set_quiet(&self, always: Arc<Always>) {
        *self.quiet.lock().unwrap_or_else(PoisonError::into_inner) = always;
    }

    /// Everything enforces.
    pub fn ready(&self) {
        // Whoever waits for this line reads; the queue is empty at the start.
        let _ = self.lines.try_send(r#"{"ready":true}"#.to_owned());
    }

    /// Tells how often recent events were repeated, and how many were lost. To be called now and then.
    pub fn settle(&self) {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        let due: Vec<_> =
            told.recent.extract_if(|_, recent| now.duration_since(recent.since) >= WINDOW).collect();
        for (event, recent) in due.into_iter().filter(|(_, recent)| recent.repeated > 0) {
            let line = format!(r#"{{"event":{event},"repeated":{}}}"#, recent.repeated);
            if !told.budget.take() || self.lines.try_send(line).is_err() {
                told.lost += recent.repeated;
            }
        }
        if told.lost > 0 {
            let detail = format!("{} events", told.lost);
            let note = Event::Noted { what: "suppressed".into(), detail };
            if told.budget.take() && self.lines.try_send(encoded(&Line { event: &note })).is_ok() {
                told.lost = 0;
            }
        }
    }

    fn is_quiet(&self, event: &Event) -> bool {
        let Event::Denied { host: Some(host), .. } = event else { return false };
        self.quiet.lock().unwrap_or_else(PoisonError::into_inner).skips(host)
    }
}

impl Audit for Output {
    fn tell(&self, event: Event) {
        if let (
            Some(denials),
            Event::Denied { by: Gate::Dns | Gate::Sni | Gate::Http, host: Some(host), .. },
        ) = (&self.denials, &event)
        {
            denials.report(host);
        }
        if self.is_quiet(&event) {
            return;
        }
        let key = encoded(&event);
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(recent) = told.recent.get_mut(&key)
            && now.duration_since(recent.since) < WINDOW
        {
            recent.repeated += 1;
            return;
        }
        let is_short = key.len() <= LONGEST;
        if !is_short || !told.budget.take() || self.lines.try_send(encoded(&Line { event: &event })).is_err()
        {
            told.lost += 1;
            return;
        }
        if told.recent.len() < MOST_REMEMBERED {
            told.recent.insert(key, Recent { since: now, repeated: 0 });
        }
    }
}

fn encoded(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("events have text keys only")
}

fn write(waiting: &Receiver<String>) {
    while let Ok(line) = waiting.recv() {
        let mut out = std::io::stdout().lock();
        if writeln!(out, "{line}").and_then(|()| out.flush()).is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied(host: &str) -> Event {
        let host = Some(host.to_owned());
        Event::Denied { by: Gate::Dns, host, address: None, port: None, rule: "default".into() }
    }

    #[test]
    fn an_event_is_told_once_and_then_counted() {
        let (lines, told) = sync_channel(LINES_WAITING);
        let output = Output::new(lines, None);
        for _ in 0..5 {
            output.tell(denied("a.test"));
        }
        let line = told.try_recv().unwrap();
        assert_eq!(line, r#"{"event":{"kind":"denied","by":"dns","host":"a.test","rule":"default"}}"#);
        assert!(told.try_recv().is_err());
        for recent in output.told.lock().unwrap().recent.values_mut() {
            recent.since -= WINDOW;
        }
        output.settle();
        assert!(told.try_recv().unwrap().ends_with(r#","repeated":4}"#));
        output.settle();
        assert!(told.try_recv().is_err());
    }

    #[test]
    fn a_flood_is_cut_and_its_rest_counted() {
        let (lines, told) = sync_channel(LINES_WAITING);
        let output = Output::new(lines, None);
        output.told.lock().unwrap().budget = Budget::new(10, 0);
        for number in 0..1000 {
            output.tell(denied(&format!("{number}.test")));
        }
        assert_eq!(told.try_iter().count(), 10);
        output.told.lock().unwrap().budget = Budget::new(10, 0);
        output.settle();
        assert!(told.try_recv().unwrap().contains("990 events"));
    }

    #[test]
    fn nobody_reading_does_not_hold_anybody_up() {
        let (lines, _told) = sync_channel(1);
        let output = Output::new(lines, None);
        for number in 0..50 {
            output.tell(denied(&format!("{number}.test")));
        }
        assert_eq!(output.told.lock().unwrap().lost, 49);
    }

    #[test]
    fn names_that_are_noise_are_not_told() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("log_skip.always"), "*.noise.test").unwrap();
        let always = crate::policy::always::AlwaysFiles::new(folder.path()).changed().unwrap().unwrap();
        let (lines, told) = sync_channel(LINES_WAITING);
        let output = Output::new(lines, None);
        output.set_quiet(Arc::new(always));
        output.tell(denied("a.noise.test"));
        assert!(told.try_recv().is_err());
    }
}
