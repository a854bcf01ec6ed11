//! One sandbox as the registry holds it.

use std::collections::VecDeque;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::moment::Moment;
use crate::wire::{BootId, Refusal, SandboxId, number_of};

use super::commands::Commands;
use super::intake::Intake;
use super::lease::{Input, LeaseState, LeaseTimes, next_state};
use super::log_offsets::LogOffsets;
use super::scope::RepositoryScope;
use super::token::TokenHash;

/// Tokens and boots of the past that are recognised, to be told that they are superseded.
pub(super) const MOST_PAST: usize = 16;

/// Attachments that may follow each other at once: restarts of either side, and answers that were lost.
const ATTACHMENTS_AT_ONCE: u32 = 5;
/// And one more in each of these, which is as often as an agent tries.
const ATTACHMENT_EVERY: Duration = Duration::from_secs(1);

/// What an agent of a sandbox may do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Standing {
    Active,
    /// Stopping: events, logs and results are taken, credentials refused, and a boot that was not here before is not let in.
    Draining,
    /// Nothing is taken any more.
    Gone,
}

pub(super) struct Slot {
    pub serial: u64,
    pub sandbox: SandboxId,
    pub generation: u64,
    pub token: TokenHash,
    pub retired: VecDeque<TokenHash>,
    pub scopes: Vec<RepositoryScope>,
    pub times: LeaseTimes,
    pub standing: Standing,
    pub boot: Option<BootId>,
    pub past_boots: VecDeque<BootId>,
    pub intake: Intake,
    pub logs: LogOffsets,
    pub commands: Commands,
    pub fatal_reported: bool,
    pub lease: Lease,
    pub attachments: Attachments,
    /// The earliest entry in the heap.
    pub armed: Option<Moment>,
}

#[derive(Debug)]
pub(super) struct Lease {
    pub state: LeaseState,
    /// Counts attachments in this life of the server; 0 before the first.
    pub epoch: u64,
    pub due: Option<Moment>,
    pub last_heartbeat: Option<Moment>,
}

/// How often an agent attaches. Each time is a write of the server's, and whoever is root in the box can ask for one.
#[derive(Debug, Default)]
pub(super) struct Attachments {
    /// When the last of those that were admitted is paid for, one after the other.
    paid: Moment,
}

impl Attachments {
    pub fn admit(&mut self, now: Moment) -> Result<(), Refusal> {
        if self.paid > now.after(ATTACHMENT_EVERY * (ATTACHMENTS_AT_ONCE - 1)) {
            return Err(Refusal::TooOften);
        }
        self.paid = self.paid.max(now).after(ATTACHMENT_EVERY);
        Ok(())
    }
}

impl Lease {
    pub fn new(held: bool, times: &LeaseTimes, now: Moment) -> Self {
        let state = if held { LeaseState::Parked } else { LeaseState::Expected };
        let due = state.lasts(times).map(|lasts| now.after(lasts));
        Self { state, epoch: 0, due, last_heartbeat: None }
    }

    /// Applies `input`. Returns the states before and after, or `None` if it changes nothing.
    pub fn step(
        &mut self,
        input: Input,
        times: &LeaseTimes,
        now: Moment,
    ) -> Option<(LeaseState, LeaseState)> {
        let before = self.state;
        self.state = next_state(before, input)?;
        self.due = self.state.lasts(times).map(|lasts| now.after(lasts));
        match input {
            Input::Attach => {
                self.epoch += 1;
                self.last_heartbeat = None;
            }
            Input::Heartbeat => self.last_heartbeat = Some(now),
            Input::Silence | Input::Hold | Input::Release => {}
        }
        Some((before, self.state))
    }

    /// Whether the lease with this name is the present one.
    pub fn check(&self, name: Option<&str>, incarnation: u64) -> Result<(), Refusal> {
        let number = name.and_then(|name| number_of(name, incarnation)).ok_or(Refusal::NotAttached)?;
        if number < self.epoch {
            return Err(Refusal::Superseded);
        }
        if number > self.epoch || !self.state.is_attached() {
            return Err(Refusal::NotAttached);
        }
        Ok(())
    }
}

impl Slot {
    /// The next thing that has a time.
    pub fn next_due(&self) -> Option<Moment> {
        if self.standing == Standing::Gone {
            return None;
        }
        self.lease.due.into_iter().chain(self.commands.next_due()).min()
    }

    pub fn is_held(&self) -> bool {
        matches!(self.lease.state, LeaseState::Held | LeaseState::Parked)
    }

    /// Lets a boot in. Returns whether it is another one than before.
    pub fn enter(&mut self, boot: &BootId) -> Result<bool, Refusal> {
        if self.boot.as_ref() == Some(boot) {
            return Ok(false);
        }
        if self.past_boots.contains(boot) {
            return Err(Refusal::Superseded);
        }
        if self.standing == Standing::Draining {
            return Err(Refusal::Gone);
        }
        if let Some(past) = self.boot.replace(boot.clone()) {
            remember(&mut self.past_boots, past);
        }
        self.intake = Intake::new(0);
        Ok(true)
    }
}

pub(super) fn remember<T>(past: &mut VecDeque<T>, one: T) {
    past.push_back(one);
    if past.len() > MOST_PAST {
        past.pop_front();
    }
}
