//! The SSH server in a sandbox: keys and certificates, programs and terminals, file transfer, port forwarding.
//!
//! Owns the protocol and its policy. Does not own how a process of the sandbox is made (that is [`Launch`]), how a name
//! becomes an address ([`Resolve`]), nor where connections come from: [`Server::serve_tcp`] and [`Server::serve_unix`]
//! accept them, [`Server::serve_stream`] takes one that somebody else accepted.
//!
//! Invariants that a change has to keep:
//! - nothing is done for a peer that has not signed in, and not signing in has a deadline;
//! - what a channel holds back in memory is bounded, whatever either side does;
//! - a closed connection leaves no process group of its own running.

mod access;
mod activity;
mod connection;
mod flow;
mod forward;
mod host_key;
mod launch;
mod local;
mod server;
mod session;
mod settings;
pub mod sftp;
mod transport;

pub use access::authorized_keys::{AuthorizedKey, KeyLineError};
pub use access::{Access, Grant, Refusal};
pub use activity::Activity;
pub use forward::{Forwarding, LiteralNames, Resolve, ResolveFuture, SystemNames};
pub use host_key::{HostKey, HostKeyError};
pub use launch::{Account, Exit, ExitFuture, Launch, Program, Started, Stdio};
pub use local::LocalLaunch;
/// A public key as OpenSSH writes it; parse one with `"ssh-ed25519 AAAA…".parse()`.
pub use russh::keys::PublicKey;
pub use server::Server;
pub use settings::{Clock, Event, Limits, Observe, Peer, Settings, SftpProgram};
