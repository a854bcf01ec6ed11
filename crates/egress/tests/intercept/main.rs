//! The interceptor between clients and servers of the tests' own, all on loopback: the redirection is played by a `Way`.

mod clients;
mod lending;
mod names;
mod plain;
mod stack;
mod streams;
mod vault;
