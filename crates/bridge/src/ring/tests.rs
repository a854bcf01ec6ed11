use std::fs;

use proptest::prelude::*;
use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::wire::read_events;

fn boot() -> BootId {
    "boot-1".parse().unwrap()
}

fn draft(class: Class, kind: &str, size: usize) -> Draft {
    Draft::new(class, Timestamp::UNIX_EPOCH, kind, &json!({"text": "x".repeat(size)})).unwrap()
}

fn open(dir: &TempDir, budget: u64) -> Ring {
    Ring::with_budget(dir.path(), boot(), budget).unwrap().0
}

/// Everything after `after`, in as many batches as it takes.
fn all(ring: &mut Ring, mut after: u64) -> Vec<Event> {
    let mut events = Vec::new();
    while let Some(batch) = ring.batch(after) {
        let read = read_events(&batch.body).unwrap();
        assert_eq!((read.len(), read.last().unwrap().seq), (batch.events, batch.last_seq));
        events.extend(read);
        assert!(batch.last_seq > after);
        after = batch.last_seq;
    }
    events
}

/// Every number from `after + 1` to the newest is there once, as itself or in a gap.
fn assert_contiguous(events: &[Event], after: u64, last: u64) {
    let end = events.iter().fold(after, |at, event| {
        assert_eq!(event.first_seq(), at + 1, "{event:?}");
        event.seq
    });
    assert_eq!(end, last);
}

#[test]
fn events_are_numbered_kept_and_acknowledged_cumulatively() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    assert_eq!(ring.batch(0), None);
    for n in 1..=5 {
        assert_eq!(ring.push(draft(Class::State, "s", 10)).unwrap(), n);
    }
    assert_contiguous(&all(&mut ring, 0), 0, 5);
    ring.ack(3);
    ring.ack(2);
    assert_eq!((ring.status().acked_seq, ring.status().events), (3, 2));
    assert_contiguous(&all(&mut ring, 3), 3, 5);
    ring.ack(99);
    assert_eq!((ring.status().acked_seq, ring.status().bytes, ring.has_unacked()), (5, 0, false));
}

#[test]
fn batches_stay_within_their_bounds_and_lose_nothing() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..1200 {
        ring.push(draft(Class::State, "s", 10)).unwrap();
    }
    for _ in 0..20 {
        ring.push(draft(Class::State, "s", 60_000)).unwrap();
    }
    assert_eq!(ring.batch(0).unwrap().events, MAX_EVENTS);
    let (mut after, mut batches) = (0, 0);
    while let Some(batch) = ring.batch(after) {
        assert!(batch.events <= MAX_EVENTS && batch.body.len() <= MAX_EVENTS_BYTES);
        (after, batches) = (batch.last_seq, batches + 1);
        assert_eq!(batch.more, after < 1220);
    }
    assert_eq!((after, batches), (1220, 7));
    assert_contiguous(&all(&mut ring, 0), 0, 1220);
}

#[test]
fn under_pressure_replaced_progress_goes_first_then_output_then_progress_and_state_never() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, 5_000);
    let progress = |key: &str| draft(Class::Progress, "p", 900).keyed(key);
    ring.push(draft(Class::Output, "o", 900)).unwrap();
    ring.push(progress("sync")).unwrap();
    ring.push(draft(Class::State, "s", 900)).unwrap();
    ring.push(progress("sync")).unwrap();
    ring.push(draft(Class::State, "s", 900)).unwrap();
    let kept = |ring: &Ring| ring.kept.keys().copied().collect::<Vec<_>>();
    assert_eq!(kept(&ring), [1, 2, 3, 4, 5]);
    ring.push(draft(Class::State, "s", 900)).unwrap();
    assert_eq!(kept(&ring), [1, 3, 4, 5, 6], "progress that was replaced");
    ring.push(draft(Class::State, "s", 900)).unwrap();
    assert_eq!(kept(&ring), [3, 4, 5, 6, 7], "output");
    ring.push(draft(Class::State, "s", 900)).unwrap();
    assert_eq!(kept(&ring), [3, 5, 6, 7, 8], "progress");
    for _ in 0..10 {
        ring.push(draft(Class::State, "s", 900)).unwrap();
    }
    assert_eq!(kept(&ring).len(), 15, "state is never dropped");
    let gaps: Vec<_> = all(&mut ring, 0).iter().filter_map(Event::gap).collect();
    assert_eq!(gaps, [Gap::of(1, 2), Gap::of(4, 4)]);
    assert_eq!(ring.status().dropped, 3);
}

#[test]
fn a_flood_of_output_leaves_bounded_files_and_every_state_event() {
    let dir = TempDir::new().unwrap();
    let budget = 256 * 1024;
    let mut ring = open(&dir, budget);
    for n in 0..8_000 {
        let class = if n % 100 == 0 { Class::State } else { Class::Output };
        ring.push(draft(class, "e", 900)).unwrap();
    }
    let files: u64 = fs::read_dir(dir.path()).unwrap().map(|e| e.unwrap().metadata().unwrap().len()).sum();
    assert!(files <= 2 * budget + 2 * 1024 * 1024, "{files} bytes of files");
    let events = all(&mut ring, 0);
    assert_contiguous(&events, 0, 8_000);
    assert_eq!(
        (0..80).filter(|n| events.iter().any(|e| e.seq == n * 100 + 1 && e.gap().is_none())).count(),
        80
    );
    let missing: u64 = events.iter().filter_map(Event::gap).map(|gap| gap.dropped).sum();
    assert_eq!(missing + events.iter().filter(|e| e.gap().is_none()).count() as u64, 8_000);
    assert_eq!(missing, ring.status().dropped);
}

#[test]
fn a_dropped_newest_event_is_told_too() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, 100);
    ring.push(draft(Class::State, "s", 100)).unwrap();
    ring.push(draft(Class::Output, "o", 100)).unwrap();
    let events = all(&mut ring, 0);
    assert_contiguous(&events, 0, 2);
    assert_eq!(events[1].gap(), Some(Gap::of(2, 2)));
}

#[test]
fn a_restarted_agent_finds_its_events_and_goes_on_counting() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..3 {
        ring.push(draft(Class::State, "s", 10)).unwrap();
    }
    let before = all(&mut ring, 0);
    drop(ring);
    assert_eq!(Ring::boot_of(dir.path()).unwrap(), Some(boot()));
    let (mut ring, opened) = Ring::open(dir.path(), boot()).unwrap();
    assert_eq!(opened, Opened { events: 3, cut_bytes: 0 });
    assert_eq!(ring.push(draft(Class::State, "s", 10)).unwrap(), 4);
    let after = all(&mut ring, 0);
    for (before, after) in before.iter().zip(&after) {
        assert_eq!(serde_json::to_string(before).unwrap(), serde_json::to_string(after).unwrap());
    }
    assert_contiguous(&after, 0, 4);
}

#[test]
fn numbers_do_not_start_again_when_everything_was_acknowledged() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..3_000 {
        let seq = ring.push(draft(Class::State, "s", 900)).unwrap();
        ring.ack(seq);
    }
    assert!(fs::read_dir(dir.path()).unwrap().count() <= 2, "acknowledged segments are removed");
    drop(ring);
    let mut ring = open(&dir, RING_BYTES);
    ring.reconcile(3_000);
    assert_eq!(ring.batch(3_000), None);
    assert_eq!(ring.push(draft(Class::State, "s", 1)).unwrap(), 3_001);
}

#[test]
fn another_boots_events_are_not_taken_over() {
    let dir = TempDir::new().unwrap();
    open(&dir, RING_BYTES).push(draft(Class::State, "s", 10)).unwrap();
    let (mut ring, opened) = Ring::open(dir.path(), "boot-2".parse().unwrap()).unwrap();
    assert_eq!(opened.events, 0);
    assert_eq!(ring.push(draft(Class::State, "s", 10)).unwrap(), 1);
}

#[test]
fn a_cut_or_damaged_tail_costs_its_own_records_only() {
    for (cut, lost) in [(1, 1), (200, 2)] {
        let dir = TempDir::new().unwrap();
        let mut ring = open(&dir, RING_BYTES);
        for _ in 0..10 {
            ring.push(draft(Class::State, "s", 100)).unwrap();
        }
        drop(ring);
        let path = fs::read_dir(dir.path()).unwrap().next().unwrap().unwrap().path();
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
        let (mut ring, opened) = Ring::open(dir.path(), boot()).unwrap();
        assert_eq!(opened.events, 10 - lost);
        assert!(opened.cut_bytes > 0);
        assert_contiguous(&all(&mut ring, 0), 0, 10 - lost);
    }
}

#[test]
fn damage_in_the_middle_is_a_gap_of_exactly_what_it_took() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..2_000 {
        ring.push(draft(Class::State, "s", 1_000)).unwrap();
    }
    drop(ring);
    let path = dir.path().join("0000000001.seg");
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    fs::write(&path, &bytes).unwrap();
    let mut ring = open(&dir, RING_BYTES);
    let events = all(&mut ring, 0);
    assert_contiguous(&events, 0, 2_000);
    assert_eq!(events.iter().filter(|event| event.gap().is_some()).count(), 1);
}

#[test]
fn events_of_a_ring_that_lost_its_end_move_behind_what_the_server_has() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..10 {
        ring.push(draft(Class::State, "s", 100)).unwrap();
    }
    drop(ring);
    let path = dir.path().join("0000000001.seg");
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, &bytes[..bytes.len() - 300]).unwrap();
    // The server has all ten; seven or eight are left here, and two more happen before the attachment.
    let mut ring = open(&dir, RING_BYTES);
    ring.push(draft(Class::State, "new", 1)).unwrap();
    ring.push(draft(Class::State, "newer", 1)).unwrap();
    ring.reconcile(10);
    let told: Vec<_> = all(&mut ring, 10).into_iter().map(|event| (event.seq, event.kind)).collect();
    assert_eq!(told, [(11, "new".to_owned()), (12, "newer".to_owned())]);
    drop(ring);
    assert_contiguous(&all(&mut open(&dir, RING_BYTES), 10), 10, 12);
}

#[test]
fn a_server_that_lost_what_it_had_is_told_by_a_gap() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    for _ in 0..10 {
        ring.push(draft(Class::State, "s", 1)).unwrap();
    }
    ring.ack(8);
    ring.reconcile(4);
    let acked = ring.status().acked_seq;
    let events = all(&mut ring, acked);
    assert_eq!(events[0].gap(), Some(Gap::of(5, 8)));
    assert_contiguous(&events, 4, 10);
}

#[test]
fn a_ring_without_a_disk_keeps_events_in_memory() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    fs::remove_dir_all(dir.path()).unwrap();
    ring.push(draft(Class::State, "s", 1)).unwrap();
    assert!(ring.status().disk_failed);
    assert_contiguous(&all(&mut ring, 0), 0, 1);
    ring.ack(1);
    assert_eq!(ring.status().bytes, 0);
}

#[test]
fn a_ring_in_memory_counts_drops_and_moves_as_one_on_disk_does() {
    let mut ring = Ring::in_memory(boot());
    for _ in 0..200 {
        ring.push(draft(Class::Output, "o", 60_000)).unwrap();
    }
    assert!(ring.status().bytes <= RING_BYTES && ring.status().dropped > 0);
    ring.reconcile(300);
    assert_contiguous(&all(&mut ring, 300), 300, 500);
}

#[test]
fn what_does_not_fit_a_request_is_refused_and_takes_no_number() {
    let dir = TempDir::new().unwrap();
    let mut ring = open(&dir, RING_BYTES);
    let refused = ring.push(draft(Class::Output, "o", MAX_EVENT_BYTES)).unwrap_err();
    assert!(matches!(refused, PushError::TooLarge { .. }), "{refused}");
    assert!(matches!(ring.push(draft(Class::State, GAP, 1)), Err(PushError::Name)));
    let mut pretty = draft(Class::State, "s", 1);
    pretty.data = RawValue::from_string("{\n  \"a\": 1\n}".to_owned()).unwrap();
    assert_eq!(ring.push(pretty).unwrap(), 1);
    assert_eq!(all(&mut ring, 0)[0].data.get(), r#"{"a":1}"#);
}

#[derive(Debug, Clone)]
enum Op {
    Push(u8, usize, u8),
    Ack(u64),
    Reopen,
    Read,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let op = prop_oneof![
        6 => (0..3u8, 1..900usize, 0..3u8).prop_map(|(class, size, key)| Op::Push(class, size, key)),
        1 => (1..40u64).prop_map(Op::Ack),
        1 => Just(Op::Reopen),
        1 => Just(Op::Read),
    ];
    prop::collection::vec(op, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever happens to a small ring: every number is accounted for, state events are all there, in order.
    #[test]
    fn nothing_is_lost_silently(ops in ops()) {
        let dir = TempDir::new().unwrap();
        let mut ring = open(&dir, 4_000);
        let (mut acked, mut last, mut states) = (0, 0, Vec::new());
        for op in ops {
            match op {
                Op::Push(class, size, key) => {
                    let class = [Class::State, Class::Progress, Class::Output][usize::from(class)];
                    last = ring.push(draft(class, "e", size).keyed(&key.to_string())).unwrap();
                    if class == Class::State {
                        states.push(last);
                    }
                }
                Op::Ack(by) => {
                    acked = (acked + by).min(last);
                    ring.ack(acked);
                }
                Op::Reopen => {
                    drop(ring);
                    ring = open(&dir, 4_000);
                    ring.reconcile(acked);
                }
                Op::Read => {
                    let events = all(&mut ring, acked);
                    assert_contiguous(&events, acked, last);
                    let told: Vec<u64> = events.iter().filter(|e| e.gap().is_none()).map(|e| e.seq).collect();
                    for state in states.iter().filter(|seq| **seq > acked) {
                        prop_assert!(told.contains(state), "state event {state} is missing");
                    }
                }
            }
        }
    }
}
