//! Commands that arrived in this run of the agent, so that one that comes again is not carried out again.

use std::collections::{HashMap, VecDeque};

use crate::wire::limits::MAX_COMMANDS;
use crate::wire::{CommandId, Outcome};

/// The server never has more than [`MAX_COMMANDS`] open, so what is older than four times as many does not come again.
const REMEMBERED: usize = 4 * MAX_COMMANDS;

#[derive(Debug, Default)]
pub(super) struct Seen {
    outcomes: HashMap<CommandId, Option<Outcome>>,
    order: VecDeque<CommandId>,
}

/// What to do with a command that arrived.
#[derive(Debug, PartialEq)]
pub(super) enum Arrival {
    New,
    /// It is being carried out.
    Running,
    /// It was carried out; the server seems not to know.
    Settled(Outcome),
}

impl Seen {
    pub fn arrive(&mut self, command: &CommandId) -> Arrival {
        match self.outcomes.get(command) {
            Some(Some(outcome)) => Arrival::Settled(outcome.clone()),
            Some(None) => Arrival::Running,
            None => {
                self.outcomes.insert(command.clone(), None);
                self.order.push_back(command.clone());
                if self.order.len() > REMEMBERED
                    && let Some(oldest) = self.order.pop_front()
                {
                    self.outcomes.remove(&oldest);
                }
                Arrival::New
            }
        }
    }

    /// Notes how a command ended; only the first time counts.
    pub fn settle(&mut self, command: &CommandId, outcome: &Outcome) -> bool {
        match self.outcomes.get_mut(command) {
            Some(slot @ None) => {
                *slot = Some(outcome.clone());
                true
            }
            Some(Some(_)) => false,
            None => true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_is_new_once() {
        let mut seen = Seen::default();
        let id: CommandId = "c-1".parse().unwrap();
        assert_eq!(seen.arrive(&id), Arrival::New);
        assert_eq!(seen.arrive(&id), Arrival::Running);
        assert!(seen.settle(&id, &Outcome::done()));
        assert!(!seen.settle(&id, &Outcome::failed("X", "second")));
        assert_eq!(seen.arrive(&id), Arrival::Settled(Outcome::done()));
        for n in 0..REMEMBERED {
            seen.arrive(&format!("d-{n}").parse().unwrap());
        }
        assert_eq!((seen.order.len(), seen.outcomes.len()), (REMEMBERED, REMEMBERED));
    }
}
