//! What the server has to keep over its own restart, as plain values.
//!
//! Everything else is found out again: agents attach anew, and commands without a result end with the life that sent them. An
//! `acked_seq` must be stored together with the events that it speaks of, so that it is neither ahead nor behind.
//! The other values change with what the embedder itself decides, with a new boot (a notice says so) and with a first fatal report.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::moment::Moment;
use crate::wire::{AckedLog, BootId, SandboxId};

use super::commands::Commands;
use super::intake::Intake;
use super::lease::LeaseTimes;
use super::log_offsets::LogOffsets;
use super::registry::Registry;
use super::scope::RepositoryScope;
use super::slot::{Attachments, Lease, Slot, Standing};
use super::token::TokenHash;

/// One sandbox as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct SavedSandbox {
    pub sandbox: SandboxId,
    pub generation: u64,
    pub token: TokenHash,
    /// Tokens of earlier generations, which are told that they are superseded.
    #[serde(default)]
    pub retired: Vec<TokenHash>,
    pub standing: Standing,
    pub boot: Option<BootId>,
    #[serde(default)]
    pub past_boots: Vec<BootId>,
    /// The newest event of `boot` that is stored.
    pub acked_seq: u64,
    #[serde(default)]
    pub logs: Vec<AckedLog>,
    #[serde(default)]
    pub repositories: Vec<RepositoryScope>,
    pub times: LeaseTimes,
    /// The box is frozen.
    #[serde(default)]
    pub held: bool,
    #[serde(default)]
    pub fatal_reported: bool,
}

impl Registry {
    /// Every sandbox, to be stored.
    pub fn saved(&self) -> Vec<SavedSandbox> {
        self.all().map(SavedSandbox::of).collect()
    }

    /// One sandbox, to be stored when it changed.
    pub fn saved_sandbox(&self, sandbox: &str) -> Option<SavedSandbox> {
        self.get(sandbox).map(SavedSandbox::of)
    }

    /// A registry of what was stored. Every agent is expected to attach again, with as much time as it would have had to be
    /// noticed as lost.
    pub fn restored(incarnation: u64, saved: Vec<SavedSandbox>, now: Moment) -> Self {
        let mut registry = Self::new(incarnation);
        let now = registry.tick(now);
        for one in saved {
            let slot = one.into_slot(registry.incarnation, now);
            registry.insert(slot);
        }
        registry
    }
}

impl SavedSandbox {
    fn of(slot: &Slot) -> Self {
        Self {
            sandbox: slot.sandbox.clone(),
            generation: slot.generation,
            token: slot.token,
            retired: slot.retired.iter().copied().collect(),
            standing: slot.standing,
            boot: slot.boot.clone(),
            past_boots: slot.past_boots.iter().cloned().collect(),
            acked_seq: slot.intake.acked(),
            logs: slot.logs.get().collect(),
            repositories: slot.scopes.clone(),
            times: slot.times,
            held: slot.is_held(),
            fatal_reported: slot.fatal_reported,
        }
    }

    fn into_slot(self, incarnation: u64, now: Moment) -> Slot {
        let mut lease = Lease::new(self.held, &self.times, now);
        if !self.held && self.boot.is_some() {
            let patience =
                self.times.attach.unwrap_or(Duration::ZERO).max(self.times.timeout + self.times.grace);
            lease.due = Some(now.after(patience));
        }
        Slot {
            serial: 0,
            sandbox: self.sandbox,
            generation: self.generation,
            token: self.token,
            retired: self.retired.into(),
            scopes: self.repositories,
            times: self.times,
            standing: self.standing,
            boot: self.boot,
            past_boots: self.past_boots.into(),
            intake: Intake::new(self.acked_seq),
            logs: LogOffsets::of(self.logs),
            commands: Commands::new(incarnation),
            fatal_reported: self.fatal_reported,
            lease,
            attachments: Attachments::default(),
            armed: None,
        }
    }
}
