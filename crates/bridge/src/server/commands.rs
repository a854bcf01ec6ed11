//! Commands of one sandbox that wait for their result.
//!
//! Delivered at least once: to every stream that does not begin behind them, until there is a result or the deadline passes.

use std::collections::VecDeque;
use std::time::Duration;

use jiff::Timestamp;
use serde_json::Value;

use crate::moment::Moment;
use crate::wire::limits::{MAX_COMMAND_BYTES, MAX_COMMANDS};
use crate::wire::{Command, CommandFrame, CommandId, Refusal, Secret, number_of};

/// Results that are recognised as repeated.
const REMEMBERED: usize = MAX_COMMANDS;

#[derive(Debug)]
pub(super) struct Commands {
    /// Names commands of one life of the server, so that no two of different lives have one name.
    incarnation: u64,
    next: u64,
    open: VecDeque<Open>,
    settled: VecDeque<u64>,
}

#[derive(Debug)]
struct Open {
    number: u64,
    kind: String,
    data: Secret<Value>,
    due: Option<Moment>,
    deadline_at: Option<Timestamp>,
}

/// What a result was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Settled {
    /// The first for this command.
    First,
    /// It was known already.
    Repeated,
    /// Of no command that waits: expired, of an earlier life of the server, or invented. Answered like the others, as there is
    /// nothing that the agent could do about it.
    Unknown,
}

impl Commands {
    pub fn new(incarnation: u64) -> Self {
        Self { incarnation, next: 1, open: VecDeque::new(), settled: VecDeque::new() }
    }

    /// Queues a command. `patience` is how long its result is waited for; `wall` the time of day, to show the deadline.
    pub fn push(
        &mut self,
        command: &Command,
        patience: Option<Duration>,
        now: Moment,
        wall: Timestamp,
    ) -> Result<CommandId, Refusal> {
        if self.open.len() >= MAX_COMMANDS {
            return Err(Refusal::TooManyCommands);
        }
        let data = command.data();
        // Half of the bound is left for the rest of the frame.
        if data.to_string().len() > MAX_COMMAND_BYTES / 2 {
            return Err(Refusal::TooLarge);
        }
        let number = self.next;
        self.next += 1;
        self.open.push_back(Open {
            number,
            kind: command.kind().to_owned(),
            data: Secret::new(data),
            due: patience.map(|patience| now.after(patience)),
            deadline_at: patience.and_then(|patience| wall.checked_add(patience).ok()),
        });
        Ok(self.id(number))
    }

    /// Commands behind the one named by `after`; all of them if it is not of this life of the server.
    pub fn after(&self, after: Option<&str>, now: Moment) -> Vec<CommandFrame> {
        let after = after.and_then(|id| self.number(id)).unwrap_or(0);
        let behind = self.open.iter().filter(|open| open.number > after);
        behind.map(|open| self.frame(open, now)).collect()
    }

    /// A result came. The command waits no longer.
    pub fn settle(&mut self, id: &str) -> Settled {
        let Some(number) = self.number(id) else { return Settled::Unknown };
        if let Some(at) = self.open.iter().position(|open| open.number == number) {
            self.open.remove(at);
            self.remember(number);
            return Settled::First;
        }
        if self.settled.contains(&number) { Settled::Repeated } else { Settled::Unknown }
    }

    /// Takes out one command whose deadline passed.
    pub fn expire(&mut self, now: Moment) -> Option<CommandId> {
        let at = self.open.iter().position(|open| open.due.is_some_and(|due| due <= now))?;
        self.open.remove(at).map(|open| self.id(open.number))
    }

    /// Takes out everything: nobody will carry it out any more.
    pub fn abandon(&mut self) -> Vec<CommandId> {
        let open = std::mem::take(&mut self.open);
        open.into_iter().map(|open| self.id(open.number)).collect()
    }

    pub fn next_due(&self) -> Option<Moment> {
        self.open.iter().filter_map(|open| open.due).min()
    }

    pub fn len(&self) -> usize {
        self.open.len()
    }

    fn frame(&self, open: &Open, now: Moment) -> CommandFrame {
        let remaining = open.due.map(|due| due.since(now).as_millis());
        CommandFrame {
            command_id: self.id(open.number),
            kind: open.kind.clone(),
            deadline_at: open.deadline_at,
            remaining_ms: remaining.map(|ms| u64::try_from(ms).unwrap_or(u64::MAX)),
            data: open.data.clone(),
        }
    }

    fn id(&self, number: u64) -> CommandId {
        CommandId::numbered(self.incarnation, number)
    }

    fn number(&self, id: &str) -> Option<u64> {
        number_of(id, self.incarnation)
    }

    fn remember(&mut self, number: u64) {
        self.settled.push_back(number);
        if self.settled.len() > REMEMBERED {
            self.settled.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn push(commands: &mut Commands, patience: Option<u64>) -> CommandId {
        let patience = patience.map(Duration::from_secs);
        commands.push(&Command::Ping, patience, Moment::default(), Timestamp::UNIX_EPOCH).unwrap()
    }

    fn ids(frames: &[CommandFrame]) -> Vec<&str> {
        frames.iter().map(|frame| frame.command_id.as_str()).collect()
    }

    #[test]
    fn commands_are_told_until_they_are_settled() {
        let mut commands = Commands::new(0xa);
        let (one, two) = (push(&mut commands, None), push(&mut commands, Some(10)));
        let now = Moment::from_millis(4_000);
        assert_eq!(ids(&commands.after(None, now)), ["a-1", "a-2"]);
        assert_eq!(ids(&commands.after(Some("a-1"), now)), ["a-2"]);
        assert_eq!(ids(&commands.after(Some("b-7"), now)), ["a-1", "a-2"], "a position of another life");
        let frame = &commands.after(Some("a-1"), now)[0];
        assert_eq!(frame.remaining_ms, Some(6_000));
        assert_eq!(frame.deadline_at.unwrap().to_string(), "1970-01-01T00:00:10Z");
        assert_eq!(commands.settle(one.as_str()), Settled::First);
        assert_eq!(commands.settle(one.as_str()), Settled::Repeated);
        assert_eq!(commands.settle("b-1"), Settled::Unknown);
        assert_eq!(commands.expire(Moment::from_millis(9_999)), None);
        assert_eq!(commands.expire(Moment::from_millis(10_000)), Some(two.clone()));
        assert_eq!(commands.settle(two.as_str()), Settled::Unknown);
        assert_eq!((commands.len(), commands.next_due()), (0, None));
    }

    #[test]
    fn the_queue_is_bounded() {
        let mut commands = Commands::new(1);
        for _ in 0..MAX_COMMANDS {
            push(&mut commands, None);
        }
        let refused = commands.push(&Command::Ping, None, Moment::default(), Timestamp::UNIX_EPOCH);
        assert_eq!(refused, Err(Refusal::TooManyCommands));
        assert_eq!(commands.abandon().len(), MAX_COMMANDS);
        let huge = Command::ServiceStart { name: "x".repeat(MAX_COMMAND_BYTES) };
        let refused = commands.push(&huge, None, Moment::default(), Timestamp::UNIX_EPOCH);
        assert_eq!(refused, Err(Refusal::TooLarge));
    }
}
