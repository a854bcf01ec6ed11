//! The same events for a server that asks: an agent on another machine that cannot dial out.
//!
//! `GET …/bridge/events?after=&limit=&ack=` is [`events`], `GET …/bridge/status` is [`PullStatus`]. Numbers mean what they mean
//! when they are pushed: per boot, without holes, gaps named. The server acknowledges what it has stored with its next question.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::ring::Ring;
use crate::wire::limits::{MAX_EVENTS, MAX_EVENTS_BYTES};
use crate::wire::{Activity, BootId, Load, ServiceHealth};

/// What a server asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PullQuery {
    /// The boot that the two positions belong to. Those of another boot mean nothing here: the answer begins at 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<BootId>,
    /// Events after this one.
    #[serde(default)]
    pub after: u64,
    /// At most so many, and never more than [`MAX_EVENTS`]; 0 or nothing for that.
    #[serde(default)]
    pub limit: usize,
    /// Everything up to here is stored and may be forgotten.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ack: Option<u64>,
}

/// Events after a position.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullPage {
    pub boot_id: BootId,
    pub acked_seq: u64,
    pub last_seq: u64,
    /// [`Event`](crate::wire::Event)s, gaps among them.
    pub events: Vec<Box<RawValue>>,
    /// Whether to ask again at once.
    pub more: bool,
}

/// A sign of life that was asked for: what a heartbeat carries, and where the events stand.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PullStatus {
    pub boot_id: BootId,
    pub generation: u64,
    pub agent_version: String,
    pub protocol_version: u32,
    pub acked_seq: u64,
    pub last_seq: u64,
    #[serde(default)]
    pub activity: Activity,
    #[serde(default)]
    pub services: Vec<ServiceHealth>,
    #[serde(default)]
    pub load: Load,
}

/// Answers a question.
pub fn events(ring: &mut Ring, query: &PullQuery) -> PullPage {
    let known = query.boot.as_ref().is_none_or(|boot| boot == ring.boot());
    if let Some(ack) = query.ack.filter(|_| known) {
        // The first position that a server names is what it names when an agent attaches.
        if ring.is_unreconciled() { ring.reconcile(ack) } else { ring.ack(ack) }
    }
    let limit = if query.limit == 0 { MAX_EVENTS } else { query.limit.min(MAX_EVENTS) };
    let batch = ring.batch_of(if known { query.after } else { 0 }, limit, MAX_EVENTS_BYTES);
    let more = batch.as_ref().is_some_and(|batch| batch.more);
    let lines = batch.as_ref().map_or(&[][..], |batch| &batch.body);
    // Every line is JSON that the ring wrote.
    let events = lines.split(|b| *b == b'\n').filter_map(|line| serde_json::from_slice(line).ok()).collect();
    let status = ring.status();
    PullPage {
        boot_id: ring.boot().clone(),
        acked_seq: status.acked_seq,
        last_seq: status.last_seq,
        events,
        more,
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;
    use crate::ring::Draft;
    use crate::wire::{Class, Event};

    #[test]
    fn a_server_that_asks_gets_each_event_and_forgets_what_it_stored() {
        let dir = tempfile::tempdir().unwrap();
        let (mut ring, _) = Ring::open(dir.path(), "b".parse().unwrap()).unwrap();
        for n in 0..7 {
            ring.push(Draft::new(Class::State, Timestamp::UNIX_EPOCH, "n", &n).unwrap()).unwrap();
        }
        let (mut query, mut seen) = (PullQuery { limit: 3, ..PullQuery::default() }, Vec::new());
        loop {
            let page = events(&mut ring, &query);
            seen.extend(page.events.iter().map(|raw| serde_json::from_str::<Event>(raw.get()).unwrap().seq));
            query.after = *seen.last().unwrap();
            query.ack = Some(query.after);
            if !page.more {
                break;
            }
        }
        assert_eq!(seen, [1, 2, 3, 4, 5, 6, 7]);
        let page = events(&mut ring, &query);
        assert_eq!((page.acked_seq, page.last_seq, page.events.len(), ring.status().events), (7, 7, 0, 0));
    }

    #[test]
    fn positions_of_another_boot_mean_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let (mut ring, _) = Ring::open(dir.path(), "new".parse().unwrap()).unwrap();
        ring.push(Draft::new(Class::State, Timestamp::UNIX_EPOCH, "n", &1).unwrap()).unwrap();
        let query = PullQuery { boot: Some("old".parse().unwrap()), after: 9, limit: 0, ack: Some(9) };
        let page = events(&mut ring, &query);
        assert_eq!((page.boot_id.as_str(), page.acked_seq, page.events.len()), ("new", 0, 1));
    }

    #[test]
    fn a_question_that_is_repeated_gets_the_same_answer() {
        let dir = tempfile::tempdir().unwrap();
        let (mut ring, _) = Ring::open(dir.path(), "b".parse().unwrap()).unwrap();
        ring.push(Draft::new(Class::State, Timestamp::UNIX_EPOCH, "n", &1).unwrap()).unwrap();
        let ask = |ring: &mut Ring| serde_json::to_string(&events(ring, &PullQuery::default())).unwrap();
        assert_eq!(ask(&mut ring), ask(&mut ring));
    }
}
