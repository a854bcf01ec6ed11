//! The interceptor between clients and servers of the tests' own, on loopback; the redirection is played by a `Way`, in one test it is real.

#![expect(clippy::unwrap_used, reason = "a failed step of a test should panic at its line")]

mod bounds;
mod clients;
mod kernel;
mod lending;
mod names;
mod openings;
mod plain;
mod sizes;
mod stack;
mod streams;
mod vault;
