//! The interceptor: takes the TCP connections that the kernel redirects, judges the host that each is for, and lends credentials to requests.
//!
//! Owns everything between a redirected connection and the server behind its original destination. Does not decide what is redirected, nor
//! what a name or an address may do: [`Rules`](crate::policy::Rules) and [`Resolved`](crate::policy::Resolved) do.
//!
//! Invariants: a connection goes to its original destination or nowhere (or through the configured proxy, to the name that was judged); a
//! credential goes only to a server that has proved the name it is lent for; what cannot be decided is refused.

mod authority;
mod connection;
mod exchange;
mod hello;
mod host;
mod judge;
mod message;
mod proxy;
mod retry;
mod rewrite;
mod service;
mod trust;
mod tunnel;
mod upstream;
mod way;

pub use authority::{Authority, AuthorityError};
pub use proxy::{InvalidProxy, UpstreamProxy};
pub use service::{Interceptor, Parts};
pub use trust::Trust;
pub use way::{Kernel, Pending, Way};

/// Connections at a time; more wait in the kernel's queue. Each holds at most some 1.5 MiB, and nearly always a few KiB.
const MAX_CONNECTIONS: usize = 1024;
/// Bytes of a request's head, and of an answer's.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 200;
/// Bytes of a body that are held to have placeholders replaced.
const MAX_BODY: usize = 1 << 20;
/// Bytes of such a body once they are.
const MAX_REPLACED: usize = 2 << 20;
/// Bodies that are held at a time.
const MAX_HELD: usize = 16;
