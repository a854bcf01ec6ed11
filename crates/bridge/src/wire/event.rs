//! `POST /internal/agent/v1/events`: newline-delimited JSON, at most [`MAX_EVENTS`] lines and [`MAX_EVENTS_BYTES`].

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::limits::{MAX_EVENTS, MAX_EVENTS_BYTES};

/// The type of a [`Gap`].
pub const GAP: &str = "gap";

/// What may happen to an event when there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// A fact that somebody waits for. Never dropped.
    State,
    /// How far something is. A later one with the same key makes it superfluous.
    Progress,
    /// Text that a program wrote. Dropped oldest first.
    Output,
}

/// Something that happened in the box.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Event {
    /// From 1, by one, per boot. A [`Gap`] has the number of the last event that it stands for.
    pub seq: u64,
    /// When, by the box's clock: for display only.
    pub time: Timestamp,
    #[serde(rename = "type")]
    pub kind: String,
    /// JSON without line breaks.
    #[serde(default = "nothing")]
    pub data: Box<RawValue>,
}

/// Data of an event of type [`GAP`]: events that were dropped, each number of `from..=to` and no other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Gap {
    pub from: u64,
    pub to: u64,
    /// `to - from + 1`, written out for readers.
    pub dropped: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct EventsReply {
    /// Every event up to this one is stored.
    pub acked_seq: u64,
}

/// A body that is no batch of events.
#[derive(Debug, thiserror::Error)]
pub enum MalformedEvents {
    #[error("a batch holds at most {MAX_EVENTS} events and {MAX_EVENTS_BYTES} bytes")]
    TooLarge,
    #[error("line {line} is not an event")]
    Line { line: usize, source: serde_json::Error },
    #[error("line {line} is a gap that does not end at its own number or counts wrongly")]
    Gap { line: usize },
}

impl Gap {
    /// The gap of `from..=to`, which must not be empty.
    pub fn of(from: u64, to: u64) -> Self {
        debug_assert!(from <= to);
        Self { from, to, dropped: to.saturating_sub(from) + 1 }
    }

    /// As an event.
    pub fn into_event(self, time: Timestamp) -> Event {
        let data = format!(r#"{{"from":{},"to":{},"dropped":{}}}"#, self.from, self.to, self.dropped);
        Event {
            seq: self.to,
            time,
            kind: GAP.to_owned(),
            data: RawValue::from_string(data).unwrap_or_else(|_| nothing()),
        }
    }
}

impl Event {
    /// The first number that the event accounts for: its own, or a gap's start.
    pub fn first_seq(&self) -> u64 {
        self.gap().map_or(self.seq, |gap| gap.from)
    }

    /// The gap that this is, if it is one.
    pub fn gap(&self) -> Option<Gap> {
        if self.kind == GAP { serde_json::from_str(self.data.get()).ok() } else { None }
    }
}

fn nothing() -> Box<RawValue> {
    RawValue::NULL.to_owned()
}

/// Reads a batch. Empty lines are skipped; whether the numbers follow each other is the registry's business.
pub fn read_events(body: &[u8]) -> Result<Vec<Event>, MalformedEvents> {
    if body.len() > MAX_EVENTS_BYTES {
        return Err(MalformedEvents::TooLarge);
    }
    let mut events = Vec::new();
    for (index, line) in body.split(|b| *b == b'\n').enumerate() {
        if line.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        if events.len() == MAX_EVENTS {
            return Err(MalformedEvents::TooLarge);
        }
        let event: Event = serde_json::from_slice(line)
            .map_err(|source| MalformedEvents::Line { line: index + 1, source })?;
        let honest = |gap: Gap| {
            gap.to == event.seq && gap.from <= gap.to && gap.from > 0 && gap.dropped == gap.to - gap.from + 1
        };
        if event.kind == GAP && !event.gap().is_some_and(honest) {
            return Err(MalformedEvents::Gap { line: index + 1 });
        }
        events.push(event);
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_unknown_types_and_with_unknown_fields_are_read() {
        let body =
            br#"{"seq":1,"time":"2026-01-02T03:04:05Z","type":"x.new","data":{"a":[1, 2]},"later":true}

{"seq":2,"time":"2026-01-02T03:04:05Z","type":"bare"}
"#;
        let events = read_events(body).unwrap();
        assert_eq!((events[0].kind.as_str(), events[0].data.get()), ("x.new", r#"{"a":[1, 2]}"#));
        assert_eq!((events[1].seq, events[1].data.get()), (2, "null"));
    }

    #[test]
    fn a_gap_says_exactly_what_it_stands_for() {
        let gap = Gap::of(3, 7);
        let event = gap.into_event(Timestamp::UNIX_EPOCH);
        assert_eq!((event.seq, event.first_seq(), event.gap()), (7, 3, Some(gap)));
        assert_eq!(gap.dropped, 5);
        let line = |from: u64, to: u64, dropped: u64| {
            format!(
                r#"{{"seq":7,"time":"1970-01-01T00:00:00Z","type":"gap","data":{{"from":{from},"to":{to},"dropped":{dropped}}}}}"#
            )
        };
        assert!(read_events(line(3, 7, 5).as_bytes()).is_ok());
        for (from, to, dropped) in [(3, 8, 6), (3, 7, 4), (8, 7, 0), (0, 7, 8)] {
            let read = read_events(line(from, to, dropped).as_bytes());
            assert!(matches!(read, Err(MalformedEvents::Gap { line: 1 })), "{from} {to} {dropped}");
        }
    }

    #[test]
    fn batches_are_bounded() {
        let line = "{\"seq\":1,\"time\":\"1970-01-01T00:00:00Z\",\"type\":\"t\"}\n";
        assert_eq!(read_events(line.repeat(MAX_EVENTS).as_bytes()).unwrap().len(), MAX_EVENTS);
        assert!(matches!(
            read_events(line.repeat(MAX_EVENTS + 1).as_bytes()),
            Err(MalformedEvents::TooLarge)
        ));
        assert!(matches!(read_events(&vec![b'\n'; MAX_EVENTS_BYTES + 1]), Err(MalformedEvents::TooLarge)));
        assert!(matches!(read_events(b"{}\n"), Err(MalformedEvents::Line { line: 1, .. })));
    }
}
