//! Events of one boot: each is accepted once, in order.
//!
//! Accepting takes two steps, because between them somebody writes to a disk: [`Intake::admit`] says what of a batch is new, and
//! [`Intake::commit`] moves the acknowledged position once that is stored. One batch at a time is between the two.

use std::time::Duration;

use jiff::Timestamp;

use crate::moment::Moment;
use crate::wire::{BootId, Event, Gap, Refusal};

/// Whoever stores a batch and has not said so after this long is taken for gone, and the next batch may come.
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Intake {
    acked: u64,
    pending: Option<Pending>,
    tickets: u64,
}

#[derive(Debug)]
struct Pending {
    ticket: u64,
    since: Moment,
    to: u64,
}

/// The right to commit a batch, once. Losing it loses nothing: the agent sends the batch again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ticket {
    pub(super) boot: BootId,
    number: u64,
}

/// The part of a batch that is new.
#[derive(Debug)]
pub struct Admitted {
    /// New events, in order and without holes. A gap that was partly known is cut to what is not.
    pub events: Vec<Event>,
    pub boot: BootId,
    /// The position before, which the store should compare with its own in the same transaction.
    pub from: u64,
    /// The position when they are stored.
    pub to: u64,
    /// To [commit](super::Registry::commit) with; `None` if there is nothing new to store.
    pub ticket: Option<Ticket>,
}

impl Intake {
    pub fn new(acked: u64) -> Self {
        Self { acked, pending: None, tickets: 0 }
    }

    pub fn acked(&self) -> u64 {
        self.acked
    }

    /// What of `events` is new. Known ones are passed over; where a number is missing the rest is left, and the unchanged position
    /// tells the agent where to begin.
    pub fn admit(&mut self, boot: &BootId, events: Vec<Event>, now: Moment) -> Result<Admitted, Refusal> {
        if self.pending.as_ref().is_some_and(|pending| now.since(pending.since) < PATIENCE) {
            return Err(Refusal::Busy);
        }
        self.pending = None;
        let mut new = Vec::new();
        let mut at = self.acked;
        for event in events {
            if event.seq <= at {
                continue;
            }
            match event.gap() {
                Some(gap) if gap.from <= at + 1 => {
                    let time: Timestamp = event.time;
                    new.push(if gap.from == at + 1 {
                        event
                    } else {
                        Gap::of(at + 1, gap.to).into_event(time)
                    });
                    at = gap.to;
                }
                None if event.seq == at + 1 => {
                    at = event.seq;
                    new.push(event);
                }
                _ => break,
            }
        }
        let ticket = (at > self.acked).then(|| {
            self.tickets += 1;
            self.pending = Some(Pending { ticket: self.tickets, since: now, to: at });
            Ticket { boot: boot.clone(), number: self.tickets }
        });
        Ok(Admitted { events: new, boot: boot.clone(), from: self.acked, to: at, ticket })
    }

    /// The batch is stored. Returns the position, or `None` if another batch took this one's place.
    pub fn commit(&mut self, ticket: &Ticket) -> Option<u64> {
        let pending = self.pending.take_if(|pending| pending.ticket == ticket.number)?;
        self.acked = pending.to;
        Some(self.acked)
    }

    /// The batch could not be stored.
    pub fn abort(&mut self, ticket: &Ticket) {
        self.pending.take_if(|pending| pending.ticket == ticket.number);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;

    fn event(seq: u64) -> Event {
        Event { seq, time: Timestamp::UNIX_EPOCH, kind: "t".into(), data: RawValue::NULL.to_owned() }
    }

    fn gap(from: u64, to: u64) -> Event {
        Gap::of(from, to).into_event(Timestamp::UNIX_EPOCH)
    }

    fn boot() -> BootId {
        "b".parse().unwrap()
    }

    fn take(intake: &mut Intake, events: Vec<Event>) -> Vec<(u64, u64)> {
        let admitted = intake.admit(&boot(), events, Moment::default()).unwrap();
        if let Some(ticket) = admitted.ticket {
            assert_eq!(intake.commit(&ticket), Some(admitted.to));
        }
        admitted.events.iter().map(|event| (event.first_seq(), event.seq)).collect()
    }

    #[test]
    fn each_number_is_accepted_once_and_in_order() {
        let mut intake = Intake::new(0);
        assert_eq!(take(&mut intake, vec![event(1), event(2)]), [(1, 1), (2, 2)]);
        assert_eq!(take(&mut intake, vec![event(1), event(2), event(3)]), [(3, 3)]);
        assert_eq!(take(&mut intake, vec![event(5)]), [], "a number is missing");
        assert_eq!(take(&mut intake, vec![event(4), event(6), event(7)]), [(4, 4)]);
        assert_eq!(take(&mut intake, vec![gap(5, 9), event(10)]), [(5, 9), (10, 10)]);
        assert_eq!(take(&mut intake, vec![gap(8, 12)]), [(11, 12)], "of a gap only what is not known");
        assert_eq!(take(&mut intake, vec![gap(14, 15)]), [], "a gap does not excuse a hole in front of it");
        assert_eq!(take(&mut intake, vec![gap(2, 5)]), []);
        assert_eq!(intake.acked(), 12);
    }

    #[test]
    fn nothing_is_acknowledged_that_is_not_stored() {
        let mut intake = Intake::new(0);
        let first = intake.admit(&boot(), vec![event(1)], Moment::default()).unwrap().ticket.unwrap();
        let second = intake.admit(&boot(), vec![event(1)], Moment::from_millis(1));
        assert!(matches!(second, Err(Refusal::Busy)));
        intake.abort(&first);
        assert_eq!(intake.acked(), 0);
        let second = intake.admit(&boot(), vec![event(1)], Moment::from_millis(2)).unwrap().ticket.unwrap();
        assert_eq!(intake.commit(&first), None, "its place was taken");
        assert_eq!(intake.commit(&second), Some(1));
        assert_eq!(intake.commit(&second), None, "once");
    }

    #[test]
    fn a_writer_that_vanished_does_not_hold_the_others_up() {
        let mut intake = Intake::new(0);
        let lost = intake.admit(&boot(), vec![event(1)], Moment::default()).unwrap().ticket.unwrap();
        let late = Moment::default().after(PATIENCE);
        let next = intake.admit(&boot(), vec![event(1), event(2)], late).unwrap();
        assert_eq!((next.from, next.to, intake.commit(&lost)), (0, 2, None));
        assert_eq!(intake.commit(&next.ticket.unwrap()), Some(2));
    }
}
