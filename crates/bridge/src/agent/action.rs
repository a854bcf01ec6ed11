//! What the state machine is made for: who speaks, what is to be done, what is told.

use std::time::Duration;

use crate::moment::Moment;
use crate::wire::{
    AttachReply, BootId, Command, CommandId, FatalReport, LeaseId, Outcome, Refusal, SandboxId,
};

use super::lane::Lane;

/// Who the agent is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    pub sandbox: SandboxId,
    pub generation: u64,
    pub boot: BootId,
    pub agent_version: String,
    pub capabilities: Vec<String>,
}

/// How long events and log bytes wait for company.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pace {
    pub linger: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { linger: Duration::from_millis(20) }
    }
}

/// What is to be done next.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Start a call; its lane is taken until the answer is told.
    Call(Call),
    /// Drop the stream, opened or opening. Nothing is told about it afterwards.
    CloseStream,
    /// Carry out a command and [settle](super::Core::settle) it.
    Deliver {
        id: CommandId,
        command: Command,
        /// When the server stops waiting, by our clock.
        expires: Option<Moment>,
    },
    Tell(Notice),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Call {
    Attach,
    Stream { lease: LeaseId, last_event_id: Option<String> },
    Heartbeat { lease: LeaseId },
    Events { lease: LeaseId },
    Logs { lease: LeaseId },
    Result { lease: LeaseId, command: CommandId, outcome: Outcome },
    Fatal(FatalReport),
}

/// What the owner of the bridge may want to know.
#[derive(Debug, Clone, PartialEq)]
pub enum Notice {
    Attached(Box<AttachReply>),
    /// The lease ended; the next attachment is under way.
    Detached,
    /// The server is stopping the sandbox.
    Draining,
    /// A fatal report arrived.
    FatalReported,
    /// The server will not take this, ever; it is dropped (of logs, the batch).
    Rejected {
        lane: Lane,
        status: u16,
    },
    /// The end: see [`Ending`].
    Ended(Ending),
}

/// Why the bridge is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The server wants nothing of this agent any more.
    Revoked(Refusal),
    /// The owner asked to drain, and everything is delivered.
    Drained,
}

impl Call {
    pub fn lane(&self) -> Lane {
        match self {
            Call::Attach => Lane::Attach,
            Call::Stream { .. } => Lane::Stream,
            Call::Heartbeat { .. } => Lane::Heartbeat,
            Call::Events { .. } => Lane::Events,
            Call::Logs { .. } => Lane::Logs,
            Call::Result { .. } => Lane::Results,
            Call::Fatal(_) => Lane::Fatal,
        }
    }

    /// The lease that it is made under.
    pub fn lease(&self) -> Option<&LeaseId> {
        match self {
            Call::Attach | Call::Fatal(_) => None,
            Call::Stream { lease, .. }
            | Call::Heartbeat { lease }
            | Call::Events { lease }
            | Call::Logs { lease }
            | Call::Result { lease, .. } => Some(lease),
        }
    }
}
