//! The registry: admission, and the way from a call to what it changes.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use jiff::Timestamp;

use crate::moment::Moment;
use crate::wire::{
    AttachReply, AttachRequest, BootId, Command, CommandFrame, CommandId, Event, GitCredentialRequest,
    HeartbeatReply, LeaseId, LogFrame, Refusal, SandboxId,
};

use super::commands::{Commands, Settled};
use super::intake::{Admitted, Intake, Ticket};
use super::lease::{Input, LeaseState, LeaseTimes};
use super::log_offsets::{LogBatch, LogOffsets, TooManyLogs};
use super::scope::RepositoryScope;
pub use super::slot::Standing;
use super::slot::{Lease, Slot, remember};
use super::timers::{Key, Timers};
use super::token::TokenHash;

/// Every sandbox that has an agent. See the [module](super).
pub struct Registry {
    incarnation: u64,
    now: Moment,
    slots: Vec<Option<Slot>>,
    free: Vec<usize>,
    by_sandbox: HashMap<SandboxId, usize>,
    by_token: HashMap<TokenHash, usize>,
    serials: u64,
    timers: Timers,
    notices: VecDeque<Notice>,
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

/// Who makes a call, as its headers say.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    pub sandbox: &'a str,
    pub generation: u64,
    pub token: &'a str,
    pub lease: Option<&'a str>,
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

/// Whether a fatal report decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FatalVerdict {
    First,
    /// Another one came first.
    Repeated,
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
    /// generation with another token. Of a generation that is registered already, only repositories and times change.
    pub fn register(&mut self, registration: Registration, now: Moment) {
        let now = self.tick(now);
        let Registration { sandbox, generation, token, repositories, times } = registration;
        if let Some((_, slot)) = self.find(sandbox.as_str())
            && (slot.generation, slot.token) == (generation, token)
        {
            slot.scopes = repositories;
            slot.times = times;
            return;
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
            armed: None,
        };
        self.insert(slot);
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

    // What an agent calls.

    /// Gives the caller a lease. Every earlier lease of the sandbox is superseded.
    ///
    /// The embedder adds expiry and configuration to the reply.
    pub fn attach(
        &mut self,
        caller: &Caller<'_>,
        request: &AttachRequest,
        now: Moment,
        wall: Timestamp,
    ) -> Result<AttachReply, Refusal> {
        let now = self.tick(now);
        let incarnation = self.incarnation;
        let (index, slot) = self.authorize(caller)?;
        if request.sandbox_id != slot.sandbox || request.generation != slot.generation {
            return Err(Refusal::WrongSandbox);
        }
        let new_boot = slot.enter(&request.boot_id)?;
        self.step_slot(index, Input::Attach, now);
        let slot = self.slots[index].as_ref().ok_or(Refusal::Unknown)?;
        let epoch = slot.lease.epoch;
        let reply = AttachReply {
            lease_id: LeaseId::numbered(incarnation, epoch),
            heartbeat_interval_seconds: slot.times.heartbeat_interval.as_secs(),
            lease_timeout_seconds: slot.times.timeout.as_secs(),
            acked_seq: slot.intake.acked(),
            server_time: wall,
            expires_at: None,
            draining: slot.standing == Standing::Draining,
            config: Default::default(),
        };
        self.notices.push_back(Notice::Attached { sandbox: slot.sandbox.clone(), epoch, new_boot });
        Ok(reply)
    }

    /// Renews the caller's lease. The embedder adds the expiry to the reply.
    pub fn heartbeat(&mut self, caller: &Caller<'_>, now: Moment) -> Result<HeartbeatReply, Refusal> {
        let now = self.tick(now);
        let (index, slot) = self.leased(caller)?;
        let reply = HeartbeatReply {
            lease_timeout_seconds: slot.times.timeout.as_secs(),
            expires_at: None,
            commands_pending: u32::try_from(slot.commands.len()).unwrap_or(u32::MAX),
            draining: slot.standing == Standing::Draining,
        };
        self.step_slot(index, Input::Heartbeat, now);
        Ok(reply)
    }

    /// The server asked an agent that cannot dial out, with that agent's own credentials, and got an answer of `boot`: as good as
    /// an attachment and a heartbeat. Returns the position to ask from.
    pub fn polled(&mut self, sandbox: &str, boot: &BootId, now: Moment) -> Result<u64, Refusal> {
        let now = self.tick(now);
        let (index, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        if slot.standing == Standing::Gone {
            return Err(Refusal::Gone);
        }
        let new_boot = slot.enter(boot)?;
        let acked = slot.intake.acked();
        if new_boot || !slot.lease.state.is_attached() {
            self.step_slot(index, Input::Attach, now);
            if let Some((_, slot)) = self.find(sandbox) {
                let (sandbox, epoch) = (slot.sandbox.clone(), slot.lease.epoch);
                self.notices.push_back(Notice::Attached { sandbox, epoch, new_boot });
            }
        }
        self.step_slot(index, Input::Heartbeat, now);
        Ok(acked)
    }

    /// What of a batch is new. Store it, then [commit](Registry::commit) the ticket.
    pub fn admit(
        &mut self,
        caller: &Caller<'_>,
        events: Vec<Event>,
        now: Moment,
    ) -> Result<Admitted, Refusal> {
        let now = self.tick(now);
        let (_, slot) = self.leased(caller)?;
        let boot = slot.boot.clone().ok_or(Refusal::NotAttached)?;
        slot.intake.admit(&boot, events, now)
    }

    /// The same for events that the server asked for itself, of the boot that gave them.
    pub fn admit_polled(
        &mut self,
        sandbox: &str,
        boot: &BootId,
        events: Vec<Event>,
        now: Moment,
    ) -> Result<Admitted, Refusal> {
        let now = self.tick(now);
        let (_, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        if slot.boot.as_ref() != Some(boot) {
            return Err(Refusal::Superseded);
        }
        slot.intake.admit(boot, events, now)
    }

    /// A batch is stored. Returns the position to acknowledge, `None` if the ticket no longer counts.
    pub fn commit(&mut self, sandbox: &str, ticket: &Ticket) -> Option<u64> {
        let (_, slot) = self.find(sandbox)?;
        if slot.boot.as_ref() != Some(&ticket.boot) {
            return None;
        }
        slot.intake.commit(ticket)
    }

    /// A batch could not be stored: the next may try.
    pub fn abort(&mut self, sandbox: &str, ticket: &Ticket) {
        if let Some((_, slot)) = self.find(sandbox)
            && slot.boot.as_ref() == Some(&ticket.boot)
        {
            slot.intake.abort(ticket);
        }
    }

    /// What of some log frames is new.
    pub fn logs(
        &mut self,
        caller: &Caller<'_>,
        frames: Vec<LogFrame>,
    ) -> Result<Result<LogBatch, TooManyLogs>, Refusal> {
        let (_, slot) = self.leased(caller)?;
        Ok(slot.logs.admit(frames))
    }

    /// Commands for the caller's stream, behind the one that it names. A stream that gets a refusal here is over.
    pub fn commands(
        &mut self,
        caller: &Caller<'_>,
        after: Option<&str>,
        now: Moment,
    ) -> Result<Vec<CommandFrame>, Refusal> {
        let now = self.tick(now);
        let (_, slot) = self.leased(caller)?;
        Ok(slot.commands.after(after, now))
    }

    /// A result of a command came. Only a first one is news.
    pub fn settle(&mut self, caller: &Caller<'_>, command: &str) -> Result<Settled, Refusal> {
        let (_, slot) = self.leased(caller)?;
        Ok(slot.commands.settle(command))
    }

    /// A fatal report came; it needs no lease.
    pub fn fatal(&mut self, caller: &Caller<'_>) -> Result<FatalVerdict, Refusal> {
        let (_, slot) = self.authorize(caller)?;
        let repeated = std::mem::replace(&mut slot.fatal_reported, true);
        Ok(if repeated { FatalVerdict::Repeated } else { FatalVerdict::First })
    }

    /// Whether the caller may have a credential, and for which of its repositories.
    pub fn credential(
        &mut self,
        caller: &Caller<'_>,
        request: &GitCredentialRequest,
    ) -> Result<&RepositoryScope, Refusal> {
        let (_, slot) = self.leased(caller)?;
        if slot.standing != Standing::Active {
            return Err(Refusal::Draining);
        }
        slot.scopes.iter().find(|scope| scope.covers(request)).ok_or(Refusal::NotDeclared)
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

    /// Who speaks, by the token. A token that is known says more than the headers: only with it is anything else revealed.
    fn authorize(&mut self, caller: &Caller<'_>) -> Result<(usize, &mut Slot), Refusal> {
        let hash = TokenHash::of(caller.token);
        let index = self.by_token.get(&hash).copied().ok_or(Refusal::BadToken)?;
        let slot = self.slots.get_mut(index).and_then(Option::as_mut).ok_or(Refusal::BadToken)?;
        let retired = slot.retired.iter().any(|past| past.is(&hash));
        if !retired && !slot.token.is(&hash) {
            return Err(Refusal::BadToken);
        }
        if slot.sandbox.as_str() != caller.sandbox || caller.generation > slot.generation {
            return Err(Refusal::WrongSandbox);
        }
        if slot.standing == Standing::Gone {
            return Err(Refusal::Gone);
        }
        if retired || caller.generation < slot.generation {
            return Err(Refusal::Superseded);
        }
        Ok((index, slot))
    }

    fn leased(&mut self, caller: &Caller<'_>) -> Result<(usize, &mut Slot), Refusal> {
        let incarnation = self.incarnation;
        let (index, slot) = self.authorize(caller)?;
        slot.lease.check(caller.lease, incarnation)?;
        Ok((index, slot))
    }

    fn step(&mut self, sandbox: &str, input: Input, now: Moment) {
        if let Some(index) = self.by_sandbox.get(sandbox).copied() {
            self.step_slot(index, input, now);
        }
    }

    fn step_slot(&mut self, index: usize, input: Input, now: Moment) {
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

    fn find(&mut self, sandbox: &str) -> Option<(usize, &mut Slot)> {
        let index = *self.by_sandbox.get(sandbox)?;
        self.slots.get_mut(index)?.as_mut().map(|slot| (index, slot))
    }

    pub(super) fn get(&self, sandbox: &str) -> Option<&Slot> {
        self.slots.get(*self.by_sandbox.get(sandbox)?)?.as_ref()
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().flatten()
    }

    pub(super) fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Time as the registry sees it: a clock that went back stands still.
    pub(super) fn tick(&mut self, now: Moment) -> Moment {
        self.now = self.now.max(now);
        self.now
    }
}

#[cfg(test)]
mod tests;
