//! What is to be sent to one receiver: a queue for each subject. Pure.

use std::collections::{BTreeMap, VecDeque};

use sandglass_sandbox::Timestamp;

use crate::record::{Delivery, DeliveryState};

#[derive(Debug, Default)]
struct Lane {
    queue: VecDeque<Delivery>,
    /// Its first is under way.
    busy: bool,
}

/// See the module documentation. Of each subject only the first is ever given out, and not again before it is back.
#[derive(Debug, Default)]
pub(super) struct Lanes {
    lanes: BTreeMap<String, Lane>,
    waiting: usize,
}

impl Lanes {
    /// Takes deliveries in, in the order of the log.
    pub(super) fn add(&mut self, deliveries: Vec<Delivery>) {
        for delivery in deliveries {
            self.waiting += 1;
            self.lanes.entry(delivery.subject.clone()).or_default().queue.push_back(delivery);
        }
    }

    /// All that has not ended, also what is under way.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// The delivery that has been due for longest, if one is.
    pub(super) fn take(&mut self, now: Timestamp) -> Option<Delivery> {
        let idle = self.lanes.values_mut().filter(|lane| !lane.busy);
        let due = |lane: &&mut Lane| lane.queue.front().is_some_and(|first| first.next_at <= now);
        let lane = idle.filter(due).min_by_key(|lane| lane.queue.front().map(|d| (d.next_at, d.seq)))?;
        lane.busy = true;
        lane.queue.front().cloned()
    }

    /// When the next one is due that is not under way.
    pub(super) fn next_at(&self) -> Option<Timestamp> {
        let idle = self.lanes.values().filter(|lane| !lane.busy);
        idle.filter_map(|lane| lane.queue.front()).map(|first| first.next_at).min()
    }

    /// A delivery is back from its attempt.
    pub(super) fn put_back(&mut self, delivery: Delivery) {
        let subject = delivery.subject.clone();
        let Some(lane) = self.lanes.get_mut(&subject) else { return };
        lane.busy = false;
        if delivery.state == DeliveryState::Pending {
            if let Some(first) = lane.queue.front_mut() {
                *first = delivery;
            }
            return;
        }
        self.waiting -= usize::from(lane.queue.pop_front().is_some());
        if lane.queue.is_empty() {
            self.lanes.remove(&subject);
        }
    }

    /// The receiver is back: what waits for it need not wait longer.
    pub(super) fn hurry(&mut self, now: Timestamp) {
        for lane in self.lanes.values_mut().filter(|lane| !lane.busy) {
            if let Some(first) = lane.queue.front_mut() {
                first.next_at = first.next_at.min(now);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::clamped(ms)
    }

    fn delivery(seq: u64, subject: &str) -> Delivery {
        Delivery::new(seq, seq.to_string(), subject.into(), "sandbox.created".into(), String::new(), at(0))
    }

    #[test]
    fn a_failed_delivery_holds_up_its_own_subject_only() {
        let mut lanes = Lanes::default();
        lanes.add(vec![delivery(1, "a"), delivery(2, "a"), delivery(3, "b")]);
        let first = lanes.take(at(0)).unwrap();
        assert_eq!((first.seq, lanes.take(at(0)).unwrap().seq), (1, 3));
        assert_eq!((lanes.take(at(0)), lanes.next_at()), (None, None), "both are under way");
        lanes.put_back(Delivery { next_at: at(500), ..first });
        assert_eq!((lanes.take(at(499)), lanes.next_at()), (None, Some(at(500))));
        let mut again = lanes.take(at(500)).unwrap();
        again.finish(DeliveryState::Dead, at(500));
        lanes.put_back(again);
        assert_eq!((lanes.take(at(500)).unwrap().seq, lanes.len()), (2, 2));
    }

    #[test]
    fn a_receiver_that_is_back_gets_everything_at_once() {
        let mut lanes = Lanes::default();
        lanes.add(vec![Delivery { next_at: at(900), ..delivery(1, "a") }]);
        lanes.hurry(at(5));
        assert_eq!(lanes.next_at(), Some(at(5)));
    }

    proptest! {
        #[test]
        fn subjects_keep_their_order(
            subjects in prop::collection::vec(0_u8..4, 1..40),
            outcomes in prop::collection::vec(0_u8..3, 200),
        ) {
            let mut lanes = Lanes::default();
            lanes.add(subjects.iter().zip(1..).map(|(s, seq)| delivery(seq, &s.to_string())).collect());
            let (mut out, mut ended, mut now) = (Vec::new(), Vec::new(), 0);
            for outcome in outcomes.into_iter().chain(std::iter::repeat(0)).take(1000) {
                now += 1;
                out.extend(lanes.take(at(now)));
                if outcome == 1 || out.is_empty() { continue }
                let mut back: Delivery = out.remove(0);
                if outcome == 0 {
                    back.finish(DeliveryState::Delivered, at(now));
                    ended.push(back.clone());
                } else {
                    back.next_at = at(now + 3);
                }
                lanes.put_back(back);
            }
            prop_assert_eq!((ended.len(), lanes.len()), (subjects.len(), 0));
            for subject in 0..4_u8 {
                let of: Vec<_> = ended.iter().filter(|d| d.subject == subject.to_string()).map(|d| d.seq).collect();
                prop_assert!(of.is_sorted());
            }
        }
    }
}
