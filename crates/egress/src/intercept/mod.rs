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
mod room;
mod service;
mod trust;
mod tunnel;
mod upstream;
mod way;

pub use authority::{Authority, AuthorityError};
pub use proxy::{InvalidProxy, UpstreamProxy};
pub use room::Room;
pub use service::{Interceptor, Parts};
pub use trust::Trust;
pub use way::{Kernel, Pending, Way};

// What all of this may hold together is bounded, whatever clients and servers do: 1,024 connections with 48 KiB each as long as nobody reads
// their requests, `Room` for those and their requests (72 MiB), 8 held bodies of at most 4 MiB: some 152 MiB, of the 256 MiB that an enforcer
// usually has. Nearly always it is a few KiB for each connection.

/// Connections at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 1024;
/// Bytes of a connection whose requests are read: the head that is arriving, and what TLS holds on both sides.
const CONNECTION: usize = 128 << 10;
/// Bytes that a connection with HTTP/2 may hold besides: what was sent to either side faster than the other takes it.
const WINDOWS: usize = 2 * CONNECTION_WINDOW as usize;
/// Bytes of one request and its answer: their heads, and what waits to be sent either way.
const EXCHANGE: usize = 2 * MAX_HEAD + 2 * (SEND_BUFFER + (16 << 10));
/// Of one stream and of all streams of a connection with HTTP/2: what a slow receiver makes this process hold.
const STREAM_WINDOW: u32 = 256 << 10;
const CONNECTION_WINDOW: u32 = 512 << 10;
/// Bytes of one stream that wait to be sent, before a last frame.
const SEND_BUFFER: usize = 16 << 10;
/// Bytes of a request's head, and of an answer's.
const MAX_HEAD: usize = 64 << 10;
const MAX_HEADERS: usize = 200;
/// Bytes of a body that are held to have placeholders replaced.
const MAX_BODY: usize = 1 << 20;
/// Bytes of such a body once they are.
const MAX_REPLACED: usize = 2 << 20;
/// Bodies that are held at a time.
const MAX_HELD: usize = 8;
