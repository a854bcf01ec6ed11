//! The registry: admission, and the way from a call to what it changes.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use jiff::Timestamp;

use crate::moment::Moment;
use crate::wire::{Command, CommandId, Refusal, SandboxId};

use super::commands::Commands;
use super::intake::Intake;
use super::lease::{Input, LeaseState, LeaseTimes};
use super::log_offsets::LogOffsets;
use super::scope::RepositoryScope;
use super::slot::{Attachments, Lease, Slot, Standing, remember};
use super::timers::{Key, Timers};
use super::token::TokenHash;

/// Every sandbox that has an agent. See the [module](super).
pub struct Registry {
    pub(super) incarnation: u64,
    now: Moment,
    pub(super) slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    by_sandbox: HashMap<SandboxId, usize>,
    pub(super) by_token: HashMap<TokenHash, usize>,
    serials: u64,
    timers: Timers,
    pub(super) notices: VecDeque<Notice>,
}

/// A sandbox's generation, with the token that was made for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registration {
    pub sandbox: SandboxId,
    pub generation: u64,
    pub token: TokenHash,
    /// Repositories that the sandbox may ask credentials for.
    pub repositories: Vec<RepositoryScope>,
    pub times: LeaseTimes,
}

/// What the embedder should act on, with the attachment that it is about: whoever decides later compares epochs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Notice {
    Attached {
        sandbox: SandboxId,
        epoch: u64,
        new_boot: bool,
    },
    /// A first heartbeat, or (`recovered`) the first after silence.
    Live {
        sandbox: SandboxId,
        epoch: u64,
        recovered: bool,
    },
    Unresponsive {
        sandbox: SandboxId,
        epoch: u64,
    },
    /// Silent for good, or (epoch 0) nobody attached in time. [`Registry::condemn`] decides a race with a late attachment.
    Lost {
        sandbox: SandboxId,
        epoch: u64,
    },
    /// No result came in time.
    CommandExpired {
        sandbox: SandboxId,
        command: CommandId,
    },
    /// No result will come: the generation that it was meant for is over.
    CommandAbandoned {
        sandbox: SandboxId,
        command: CommandId,
    },
}

impl Registry {
    /// An empty registry. `incarnation` is a random number, another one in each life of the server.
    pub fn new(incarnation: u64) -> Self {
        Self {
            incarnation,
            now: Moment::default(),
            slots: Vec::new(),
            free: Vec::new(),
            by_sandbox: HashMap::new(),
            by_token: HashMap::new(),
            serials: 0,
            timers: Timers::default(),
            notices: VecDeque::new(),
        }
    }

    /// Things that happened since the last time. To be taken after every call.
    pub fn take_notices(&mut self) -> impl Iterator<Item = Notice> + '_ {
        self.notices.drain(..)
    }

    // What the embedder decides.

    /// Expects the agent of a generation. An earlier generation's agent is superseded from here on, and so is one of the same
    /// generation with another token. Of a generation that is registered already, only repositories and times change. A generation before the registered one is refused as superseded.
    pub fn register(&mut self, registration: Registration, now: Moment) -> Result<(), Refusal> {
        let now = self.tick(now);
        let Registration { sandbox, generation, token, repositories, times } = registration;
        if let Some((_, slot)) = self.find(sandbox.as_str()) {
            if generation < slot.generation {
                return Err(Refusal::Superseded);
            }
            if (slot.generation, slot.token) == (generation, token) {
                slot.scopes = repositories;
                slot.times = times;
                return Ok(());
            }
        }
        let mut retired = VecDeque::new();
        if let Some(before) = self.by_sandbox.get(&sandbox).copied().and_then(|index| self.take(index)) {
            retired = before.retired;
            if before.token != token {
                remember(&mut retired, before.token);
            }
        }
        let slot = Slot {
            serial: 0,
            sandbox,
            generation,
            token,
            retired,
            scopes: repositories,
            times,
            standing: Standing::Active,
            boot: None,
            past_boots: VecDeque::new(),
            intake: Intake::new(0),
            logs: LogOffsets::default(),
            commands: Commands::new(self.incarnation),
            fatal_reported: false,
            lease: Lease::new(false, &times, now),
            attachments: Attachments::default(),
            armed: None,
        };
        self.insert(slot);
        Ok(())
    }

    /// Narrows a sandbox to draining: it is being stopped.
    pub fn stop(&mut self, sandbox: &str) {
        if let Some((_, slot)) = self.find(sandbox)
            && slot.standing == Standing::Active
        {
            slot.standing = Standing::Draining;
        }
    }

    /// The box is gone. Its agent, should there still be one, is told so until [`Registry::forget`].
    pub fn gone(&mut self, sandbox: &str) {
        let Some((_, slot)) = self.find(sandbox) else { return };
        slot.standing = Standing::Gone;
        let (sandbox, commands) = (slot.sandbox.clone(), slot.commands.abandon());
        self.abandon(&sandbox, commands);
    }

    /// Gives up a sandbox whose lease was lost, unless somebody attached in the meantime. Returns whether it is given up; only
    /// then may anything follow from the loss.
    pub fn condemn(&mut self, sandbox: &str, epoch: u64) -> bool {
        let lost = self
            .find(sandbox)
            .is_some_and(|(_, slot)| slot.lease.epoch == epoch && slot.lease.state == LeaseState::Lost);
        if lost {
            self.gone(sandbox);
        }
        lost
    }

    /// Nothing is known of the sandbox any more.
    pub fn forget(&mut self, sandbox: &str) {
        if let Some(index) = self.by_sandbox.get(sandbox).copied() {
            self.take(index);
        }
    }

    /// The box is about to be frozen: no deadline of its lease runs until it is [released](Registry::release).
    pub fn hold(&mut self, sandbox: &str, now: Moment) {
        let now = self.tick(now);
        self.step(sandbox, Input::Hold, now);
    }

    /// The box runs again. The agent owes a heartbeat.
    pub fn release(&mut self, sandbox: &str, now: Moment) {
        let now = self.tick(now);
        self.step(sandbox, Input::Release, now);
    }

    /// Queues a command. The result is reported by [`Registry::settle`], or a notice says that none will come.
    pub fn enqueue(
        &mut self,
        sandbox: &str,
        command: &Command,
        patience: Option<Duration>,
        now: Moment,
        wall: Timestamp,
    ) -> Result<CommandId, Refusal> {
        let now = self.tick(now);
        let (index, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        if slot.standing == Standing::Gone {
            return Err(Refusal::Gone);
        }
        let id = slot.commands.push(command, patience, now, wall)?;
        self.arm(index);
        Ok(id)
    }

    // Time.

    /// When to call [`Registry::advance`] next. May be early, never late.
    pub fn next_due(&self) -> Option<Moment> {
        self.timers.next()
    }

    /// Lets everything that is due happen, each thing once, however late it is.
    pub fn advance(&mut self, now: Moment) {
        let now = self.tick(now);
        while let Some((due, key)) = self.timers.pop(now) {
            let Some(slot) = self.slots.get_mut(key.index).and_then(Option::as_mut) else { continue };
            if slot.serial != key.serial || slot.armed != Some(due) {
                continue;
            }
            slot.armed = None;
            self.fire(key.index, now);
            self.arm(key.index);
        }
    }

    fn fire(&mut self, index: usize, now: Moment) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        if slot.standing == Standing::Gone {
            return;
        }
        while let Some(command) = slot.commands.expire(now) {
            self.notices.push_back(Notice::CommandExpired { sandbox: slot.sandbox.clone(), command });
        }
        if slot.lease.due.is_some_and(|due| due <= now) {
            self.step_slot(index, Input::Silence, now);
        }
    }

    // Looking.

    pub fn lease_state(&self, sandbox: &str) -> Option<LeaseState> {
        self.get(sandbox).map(|slot| slot.lease.state)
    }

    /// When the last heartbeat came, in this life of the server and under the present lease.
    pub fn last_heartbeat(&self, sandbox: &str) -> Option<Moment> {
        self.get(sandbox).and_then(|slot| slot.lease.last_heartbeat)
    }

    pub fn acked_seq(&self, sandbox: &str) -> Option<u64> {
        self.get(sandbox).map(|slot| slot.intake.acked())
    }

    // Inside.

    fn step(&mut self, sandbox: &str, input: Input, now: Moment) {
        if let Some(index) = self.by_sandbox.get(sandbox).copied() {
            self.step_slot(index, input, now);
        }
    }

    pub(super) fn step_slot(&mut self, index: usize, input: Input, now: Moment) {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else { return };
        let Some((before, after)) = slot.lease.step(input, &slot.times, now) else { return };
        let epoch = slot.lease.epoch;
        let sandbox = || slot.sandbox.clone();
        let notice = match (before, after) {
            (LeaseState::Attached, LeaseState::Live) => {
                Some(Notice::Live { sandbox: sandbox(), epoch, recovered: false })
            }
            (LeaseState::Unresponsive, LeaseState::Live) => {
                Some(Notice::Live { sandbox: sandbox(), epoch, recovered: true })
            }
            (_, LeaseState::Unresponsive) => Some(Notice::Unresponsive { sandbox: sandbox(), epoch }),
            (_, LeaseState::Lost) => Some(Notice::Lost { sandbox: sandbox(), epoch }),
            _ => None,
        };
        self.notices.extend(notice);
        self.arm(index);
    }

    fn arm(&mut self, index: usize) {
        if let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) {
            let due = slot.next_due();
            self.timers.arm(Key { index, serial: slot.serial }, &mut slot.armed, due);
        }
    }

    pub(super) fn insert(&mut self, mut slot: Slot) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.serials += 1;
        slot.serial = self.serials;
        self.by_sandbox.insert(slot.sandbox.clone(), index);
        self.by_token.extend(slot.retired.iter().chain([&slot.token]).map(|hash| (*hash, index)));
        self.slots[index] = Some(slot);
        self.arm(index);
    }

    fn take(&mut self, index: usize) -> Option<Slot> {
        let mut slot = self.slots.get_mut(index)?.take()?;
        self.by_sandbox.remove(&slot.sandbox);
        for hash in slot.retired.iter().chain([&slot.token]) {
            self.by_token.remove(hash);
        }
        self.free.push(index);
        let commands = slot.commands.abandon();
        self.abandon(&slot.sandbox, commands);
        Some(slot)
    }

    fn abandon(&mut self, sandbox: &SandboxId, commands: Vec<CommandId>) {
        let notice = |command| Notice::CommandAbandoned { sandbox: sandbox.clone(), command };
        self.notices.extend(commands.into_iter().map(notice));
    }

    pub(super) fn find(&mut self, sandbox: &str) -> Option<(usize, &mut Slot)> {
        let index = *self.by_sandbox.get(sandbox)?;
        self.slots.get_mut(index)?.as_mut().map(|slot| (index, slot))
    }

    pub(super) fn get(&self, sandbox: &str) -> Option<&Slot> {
        self.slots.get(*self.by_sandbox.get(sandbox)?)?.as_ref()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten()
    }

    /// Time as the registry sees it: a clock that went back stands still.
    pub(super) fn tick(&mut self, now: Moment) -> Moment {
        self.now = self.now.max(now);
        self.now
    }
}

#[cfg(test)]
mod tests;
