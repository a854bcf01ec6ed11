//! Messages of the channel, as they are written.
//!
//! JSON fields are camelCase. A reader ignores fields that it does not know, and carries types of events and commands that it does
//! not know as they are; so either side may be newer. Additions are optional and have a default that means "as before".

mod attach;
mod command;
mod credential;
mod event;
mod fatal;
mod heartbeat;
mod ids;
pub mod limits;
mod logs;
pub mod paths;
mod refusal;
mod secret;
pub mod sse;

pub use attach::{AttachReply, AttachRequest};
pub use command::{Command, CommandError, CommandFrame, MalformedCommand, Outcome};
pub use credential::{GitCredential, GitCredentialRequest};
pub use event::{Class, Event, EventsReply, GAP, Gap, MalformedEvents, read_events};
pub use fatal::FatalReport;
pub use heartbeat::{Activity, Heartbeat, HeartbeatReply, Load, ServiceHealth};
pub(crate) use ids::number_of;
pub use ids::{BootId, CommandId, InvalidId, LeaseId, SandboxId};
pub use logs::{AckedLog, LogBytes, LogFrame, LogsReply, LogsRequest};
pub use refusal::{ErrorBody, Refusal};
pub use secret::Secret;
