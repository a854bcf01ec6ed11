//! The first bytes of connections to addresses that may be reached for a name's sake only: whose name do they carry?
//!
//! Packets come out of the kernel's queue and go back with a word on them ([`inspector`]); [`flows`] puts the first
//! bytes of each connection together, [`first`] reads them with [`tls`] and [`http`]. Protocols without names, and those
//! in which the server speaks first, pass by their address; of those in which TLS follows something else, only PostgreSQL's is
//! known ([`postgres`]). What is inside TLS is not seen here, nor are further requests
//! of an HTTP connection: ports where that matters go to the gate instead.

pub mod first;
mod flows;
pub mod host;
pub mod http;
mod inspector;
pub(crate) mod packet;
mod postgres;
mod server;
pub mod tls;
mod verdict;

#[cfg(test)]
mod first_tests;
#[cfg(test)]
mod flows_tests;

pub use inspector::Inspector;
