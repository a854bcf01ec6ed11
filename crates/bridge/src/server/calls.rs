//! What an agent calls, and what the server does in the stead of one that cannot call.

use jiff::Timestamp;

use crate::moment::Moment;
use crate::wire::{
    AttachReply, AttachRequest, BootId, CommandFrame, Event, GitCredentialRequest, HeartbeatReply, LeaseId,
    LogFrame, Refusal,
};

use super::commands::Settled;
use super::intake::{Admitted, Ticket};
use super::lease::Input;
use super::log_offsets::{LogBatch, TooManyLogs};
use super::registry::{Notice, Registry};
use super::scope::RepositoryScope;
use super::slot::{Slot, Standing};
use super::token::TokenHash;

/// Who makes a call, as its headers say.
#[derive(Clone, Copy)]
pub struct Caller<'a> {
    pub sandbox: &'a str,
    pub generation: u64,
    pub token: &'a str,
    pub lease: Option<&'a str>,
}

/// Whether a fatal report decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FatalVerdict {
    First,
    /// Another one came first.
    Repeated,
}

impl Registry {
    /// Gives the caller a lease, unless it asks for one too often. Every earlier lease of the sandbox is superseded.
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
        slot.attachments.admit(now)?;
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

    /// The same for output that the server asked for itself, of the boot that gave it.
    pub fn logs_polled(
        &mut self,
        sandbox: &str,
        boot: &BootId,
        frames: Vec<LogFrame>,
    ) -> Result<Result<LogBatch, TooManyLogs>, Refusal> {
        let (_, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        if slot.boot.as_ref() != Some(boot) {
            return Err(Refusal::Superseded);
        }
        Ok(slot.logs.admit(frames))
    }

    /// Commands that the server carries out itself, in the stead of an agent that it asks.
    pub fn commands_polled(&mut self, sandbox: &str, now: Moment) -> Result<Vec<CommandFrame>, Refusal> {
        let now = self.tick(now);
        let (_, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        Ok(slot.commands.after(None, now))
    }

    /// One of them is carried out. Returns whether somebody still waits for that.
    pub fn settle_polled(&mut self, sandbox: &str, command: &str) -> Result<bool, Refusal> {
        let (_, slot) = self.find(sandbox).ok_or(Refusal::Unknown)?;
        Ok(slot.commands.settle(command) == Settled::First)
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

    /// Whether the caller is the agent of its sandbox, whatever it calls for: to be asked before anything is read from it.
    ///
    /// # Errors
    /// Why it is not, or not any more.
    pub fn authenticate(&mut self, caller: &Caller<'_>) -> Result<(), Refusal> {
        self.authorize(caller).map(drop)
    }

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
}
