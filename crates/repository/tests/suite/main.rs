//! The crate from outside: grammar, recipes and keys on files, git against real servers on loopback.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

mod dockerfile;
mod git_checkout;
mod git_failures;
mod git_http;
mod git_ssh;
mod grammar;
mod keys;
mod recipes;
mod redaction;
mod support;
